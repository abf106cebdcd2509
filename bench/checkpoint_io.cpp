// Saving and loading the parameters of a model of 100 M elements (400 MB), sharded over the ranks:
// Tessera's side of bench/checkpoint_io. Prints one line of JSON a round on rank 0, in ms: `copy`,
// what a step waits for; `save and fsync` until everything is on disk, manifest and hashes
// included; `save` the same with fsync() made to do nothing; `load` from opening to filled shards,
// every file verified, out of the page cache; `cold load`, the same after the files were dropped
// from it; `hash`, what hashing takes of each of these, in memory.
//
//   checkpoint_io FOLDER ROUNDS RANKS
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <tessera/tessera.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>

#include "base/hash.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "checkpoint/saver.h"
#include "comm/group.h"
#include "io/checkpoint_folder.h"
#include "io/checkpoint_store.h"
#include "train/resume/resume.h"

namespace {

// Whether fsync() below does what it says.
bool syncs = true;

}  // namespace

// In the place of libc's: what a save takes without it is measured too.
extern "C" int fsync(int descriptor) {
  return syncs ? static_cast<int>(::syscall(SYS_fsync, descriptor)) : 0;
}
extern "C" int sync_file_range(int descriptor, off64_t offset, off64_t size, unsigned flags) {
  return syncs ? static_cast<int>(::syscall(SYS_sync_file_range, descriptor, offset, size, flags))
               : 0;
}

namespace {

// 25 layers of four matrices [1000, 1000].
constexpr int kLayers = 25;
constexpr int kMatrices = 4;
constexpr std::int64_t kSide = 1000;

struct Weights : torch::nn::Module {
  Weights() {
    for (int i = 0; i < kLayers * kMatrices; ++i) {
      all.push_back(
          register_parameter(tessera::concat("layers_", i / kMatrices, "_weight_", i % kMatrices),
                             at::full({kSide, kSide}, 1.0 / (1 + i))));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, all[0]); }
  std::vector<at::Tensor> all;
};

double ms_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

/// The slowest rank's time, all having begun together.
double timed(tessera::World& world, const std::function<void()>& action) {
  tessera::comm::barrier(world.control(), "round");
  const auto begin = std::chrono::steady_clock::now();
  action();
  tessera::comm::barrier(world.control(), "round done");
  return ms_since(begin);
}

/// Drops what is in the page cache of the files in a folder; they are on disk already.
void drop_from_cache(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const tessera::InputFile file(entry.path());
    ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

void hash_in_parts(std::span<const std::byte> bytes) {
  constexpr std::size_t kPart = std::size_t{512} << 10;
  tessera::Hash128Stream hash;
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(kPart, bytes.size()))) {
    hash.add(bytes.first(std::min(kPart, bytes.size())));
  }
  if (hash.digest() == tessera::Hash128{}) std::abort();  // it is needed, so it is not left out
}

void run(tessera::World& world, const std::filesystem::path& folder, int rounds) {
  at::set_num_threads(1);
  tessera::log::init({.rank = world.rank() + 1, .world_size = world.size(), .file = {}});
  const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));
  auto model = tessera::fully_shard(std::make_shared<Weights>(), mesh);
  const auto optimizer = tessera::make_sgd(model, {});
  // A checkpoint of a step has what an optimizer keeps of it.
  model.forward(at::ones({1, kSide})).sum().backward();
  optimizer->step();
  tessera::checkpointing::CheckpointOptions options;
  options.folder = folder;
  options.config_json = "{}";
  options.state.source_dtype = [](const std::string&) { return std::nullopt; };
  tessera::checkpointing::CheckpointSaver saver(world, options);
  const auto share = at::ones({kLayers * kMatrices * kSide * kSide / world.size()});
  const std::span share_bytes(static_cast<const std::byte*>(share.const_data_ptr()),
                              share.nbytes());
  const auto remove = [&](int round) {  // as the others remove their files
    if (world.rank() != 0) return;
    std::filesystem::remove_all(folder / tessera::step_folder(round));
    ::sync();  // what removing leaves to do is not the next save's
  };
  for (int round = 1; round <= rounds; ++round) {
    double copy = 0;
    const auto write = [&] {
      const auto begin = std::chrono::steady_clock::now();
      saver.save(round, model, *optimizer);
      copy = ms_since(begin);
      saver.finish();
    };
    remove(round - 1);
    syncs = false;
    const double unsynced = timed(world, write);
    remove(round);
    syncs = true;
    const double save = timed(world, write);
    const auto read_back = [&] {
      const auto checkpoint = tessera::CheckpointFolder::open(folder);
      tessera::train::load_checkpoint(checkpoint, model, *optimizer, world);
    };
    const double load = timed(world, read_back);
    if (world.rank() == 0) drop_from_cache(folder);
    const double cold = timed(world, read_back);
    const double hash = timed(world, [&] { hash_in_parts(share_bytes); });
    if (world.rank() != 0) continue;
    std::printf(
        "{\"copy\": %.1f, \"save\": %.1f, \"save and fsync\": %.1f, \"load\": %.1f, "
        "\"cold load\": %.1f, \"hash\": %.1f}\n",
        copy, unsynced, save, load, cold, hash);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: checkpoint_io FOLDER ROUNDS RANKS\n");
    return 2;
  }
  return tessera::launch(std::atoi(argv[3]),
                         [&](tessera::World& world) { run(world, argv[1], std::atoi(argv[2])); });
}
