#include "grad/region.h"

#include <utility>

namespace tessera::grad {
namespace {

using RegionsHere = base::PassLocal<base::PassValue::kRegions, const std::shared_ptr<Regions>*>;
using RecordingHere = base::PassLocal<base::PassValue::kRecording, Recording*>;

}  // namespace

const std::shared_ptr<Regions>& regions_here() {
  static const std::shared_ptr<Regions> none;
  const auto* const regions = RegionsHere::here();
  return regions != nullptr ? *regions : none;
}

RegionsScope::RegionsScope(std::shared_ptr<Regions> regions)
    : regions_(std::move(regions)), outer_(std::exchange(RegionsHere::here(), &regions_)) {}
RegionsScope::~RegionsScope() { RegionsHere::here() = outer_; }

std::vector<at::Tensor> in_region(const std::shared_ptr<Regions>& regions,
                                  const std::shared_ptr<torch::nn::Module>& owner,
                                  std::string_view name, const std::vector<at::Tensor>& inputs,
                                  const RegionBody& body) {
  // A region inside a region is recorded as a part of the outer one.
  if (regions == nullptr || owner == nullptr || recording() != nullptr) return body(inputs);
  return regions->run(owner, name, inputs, body);
}

Recording* recording() { return RecordingHere::here(); }

RecordingScope::RecordingScope(Recording* recording)
    : outer_(std::exchange(RecordingHere::here(), recording)),
      no_turns_(recording != nullptr ? "a recording" : nullptr) {}
RecordingScope::~RecordingScope() { RecordingHere::here() = outer_; }

}  // namespace tessera::grad
