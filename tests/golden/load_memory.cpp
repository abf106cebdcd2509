// A program that weights_test.cpp runs: two process ranks load a model and print how far their
// memory grew.
//
//   load_memory SMALL_FOLDER FOLDER HOW
//   HOW: shards (as train does) | copies (every tensor copied first) | pages (every page of the
//   files accessed and kept): the last two do what a loader must not.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <string>

#include "comm/group.h"
#include "io/hf_folder.h"
#include "tessera/error.h"
#include "tessera/world.h"
#include "train/parallelize.h"

namespace {

using tessera::World;
namespace train = tessera::train;

/// A line of /proc/self/status, in bytes.
std::int64_t status_bytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != name + ":") continue;
    std::int64_t kib = 0;
    status >> kib;
    return kib * 1024;
  }
  throw std::runtime_error("no " + name + " in /proc/self/status");
}

/// The peak counts from here. Where the system refuses, an earlier peak may be counted too.
void forget_peak() {
  const int file = ::open("/proc/self/clear_refs", O_WRONLY);
  if (file < 0) return;
  [[maybe_unused]] const auto written = ::write(file, "5", 1);
  ::close(file);
}

std::shared_ptr<tessera::ShardedBase> load(const std::string& folder, World& world) {
  train::Config config;
  config.model.path = folder;
  const auto dims = train::resolve_parallelism(config.parallelism, world.size());
  return train::parallelize(train::open_model(config.model), config,
                            world.mesh(train::mesh_shape(dims)));
}

/// Holds the whole model: its copies, or its pages.
std::vector<at::Tensor> hold_everything(const tessera::HfFolder& folder, const std::string& how) {
  std::vector<at::Tensor> copies;
  std::int64_t sum = 0;
  for (const auto& [name, tensor] : folder.tensors()) {
    const auto bytes = folder.range(name, 0, tensor.info->numel());
    if (how == "copies") {
      copies.push_back(at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte));
      std::copy(bytes.begin(), bytes.end(), static_cast<std::byte*>(copies.back().data_ptr()));
      folder.release(name, bytes);
    } else {
      for (std::size_t i = 0; i < bytes.size(); i += 4096)
        sum += static_cast<std::int64_t>(bytes[i]);
    }
  }
  copies.push_back(at::scalar_tensor(sum));
  return copies;
}

void measure(char** arguments, World& world) {
  const std::string how = arguments[3];
  load(arguments[1], world);  // code pages, groups and pools are there afterwards
  forget_peak();
  const auto before = status_bytes("VmRSS");
  const auto folder = tessera::HfFolder::open(arguments[2]);
  std::vector<at::Tensor> held;
  if (how != "shards") held = hold_everything(folder, how);
  const auto model = load(arguments[2], world);
  const auto growth = std::to_string(status_bytes("VmHWM") - before);
  for (const auto& line : tessera::comm::all_gather_bytes(world.control(), growth, "growth")) {
    if (world.rank() == 0) std::cout << line << "\n";
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return 2;
  return tessera::launch(2, [&](World& world) { measure(arguments, world); });
}
