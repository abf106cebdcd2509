#include "grad/region.h"

#include <utility>

namespace tessera::grad {
namespace {

// A thread is a rank, so these are per rank.
thread_local std::shared_ptr<Regions> t_regions;
thread_local Recording* t_recording = nullptr;

}  // namespace

const std::shared_ptr<Regions>& regions_here() { return t_regions; }

RegionsScope::RegionsScope(std::shared_ptr<Regions> regions)
    : outer_(std::exchange(t_regions, std::move(regions))) {}
RegionsScope::~RegionsScope() { t_regions = std::move(outer_); }

std::vector<at::Tensor> in_region(const std::shared_ptr<Regions>& regions,
                                  const std::shared_ptr<torch::nn::Module>& owner,
                                  std::string_view name, const std::vector<at::Tensor>& inputs,
                                  const RegionBody& body) {
  // Of a region inside another one the outer is recorded.
  if (regions == nullptr || owner == nullptr || recording() != nullptr) return body(inputs);
  return regions->run(owner, name, inputs, body);
}

Recording* recording() { return t_recording; }

RecordingScope::RecordingScope(Recording* recording)
    : outer_(std::exchange(t_recording, recording)) {}
RecordingScope::~RecordingScope() { t_recording = outer_; }

}  // namespace tessera::grad
