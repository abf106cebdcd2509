#include "train/report/guard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/text/printable.h"
#include "comm/group.h"
#include "tessera/group.h"
#include "tessera/mesh.h"
#include "tessera/optim.h"
#include "tessera/placement.h"
#include "tessera/shard.h"
#include "train/report/checks.h"

namespace tessera::train {
namespace {

std::uint64_t hash_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
  return hash_bytes({static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
}

std::uint64_t hash_of(const BatchSource& data, const std::vector<RowRange>& rows,
                      std::int64_t step) {
  Hasher hasher;
  for (const RowRange& range : rows) {
    const MicroBatch batch = data.load(step, range);
    hasher.add(hash_of(batch.input_ids)).add(hash_of(batch.targets));
  }
  return hasher.digest();
}

/// The tensors of this rank: by a key that ranks with the same elements share, their names and
/// hashes.
class Held {
 public:
  Held(const ShardedBase& model, const Optimizer& optimizer, std::uint64_t tokens)
      : mesh_(model.mesh()) {
    for (const ShardView& view : model.shards()) {
      add(view, "", view.shard);
      if (view.shard.grad().defined()) add(view, "gradient of ", view.shard.grad());
    }
    for (const OptimizerState& state : optimizer.state()) {
      for (const auto& kept : state.kept) add(state.view, kept.name + " of ", kept.values);
    }
    for (const BufferView& buffer : model.buffers()) {
      put(Hasher().add(std::string_view(buffer.contract->name)),
          "buffer " + printable(buffer.contract->name), hash_of(buffer.tensor));
    }
    // The same rows on all ranks of a model's copy, the same random numbers on those of a stage.
    const auto at = [&](std::string_view axis) { return std::int64_t{mesh_.coordinate(axis)}; };
    put(Hasher().add(std::string_view("tokens")).add(at(axis::kReplicate)).add(at(axis::kShard)),
        "tokens of the step", tokens);
    put(Hasher()
            .add(std::string_view("random"))
            .add(at(axis::kReplicate))
            .add(at(axis::kShard))
            .add(at(axis::kPipeline)),
        "state of the random numbers", hash_of(at::detail::getDefaultCPUGenerator().get_state()));
  }

  /// The tensors that differ among the ranks of an axis, a line each.
  std::vector<std::string> differing_on(std::string_view axis) const {
    if (mesh_.size_of(axis) == 1) return {};
    const Group group = mesh_.group(axis);
    const auto device = mesh_.world()->device();
    const at::Tensor most = at::tensor({std::ssize(held_)}, at::kLong).to(device);
    group.all_reduce(most, ReduceOp::kMax, "tensors of replicas");
    const auto rows = most.item<std::int64_t>();
    at::Tensor mine = at::full({rows, 2}, 0, at::kLong);
    std::size_t row = 0;
    auto* const pairs = mine.mutable_data_ptr<std::int64_t>();
    for (const auto& [key, held] : held_) {
      pairs[row++] = static_cast<std::int64_t>(key);
      pairs[row++] = static_cast<std::int64_t>(held.hash);
    }
    const auto all = group.all_gather(mine.to(device), "hashes of replicas");
    std::map<std::uint64_t, std::vector<std::pair<int, std::uint64_t>>> by_key;  // rank and hash
    for (std::size_t member = 0; member < all.size(); ++member) {
      const at::Tensor of = all[member].to(at::kCPU).contiguous();
      const auto* values = of.const_data_ptr<std::int64_t>();
      for (std::int64_t i = 0; i < rows; ++i) {
        by_key[static_cast<std::uint64_t>(values[2 * i])].emplace_back(
            group.ranks()[member], static_cast<std::uint64_t>(values[2 * i + 1]));
      }
    }
    std::vector<std::string> lines;
    for (const auto& [key, held] : held_) {
      if (const auto others = differing_ranks(by_key.at(key)); !others.empty()) {
        lines.push_back(concat(held.name, " over ", axis, ": ", others));
      }
    }
    return lines;
  }

 private:
  /// "rank 3 has other bits than ranks 0, 1, 2"; empty where all have the same. Those that most
  /// have are right, of as many the first rank's.
  static std::string differing_ranks(const std::vector<std::pair<int, std::uint64_t>>& hashes) {
    const auto count = [&](std::uint64_t hash) {
      return std::ranges::count(hashes, hash, [](const auto& one) { return one.second; });
    };
    const auto right = std::ranges::max_element(hashes, {}, [&](const auto& one) {
                         return count(one.second);
                       })->second;
    std::vector<int> others, same;
    for (const auto& [rank, hash] : hashes) (hash == right ? same : others).push_back(rank);
    if (others.empty()) return "";
    const auto ranks = [](const std::vector<int>& of) {
      return concat(of.size() == 1 ? "rank " : "ranks ", joined(of));
    };
    return concat(ranks(others), others.size() == 1 ? " has" : " have", " other bits than ",
                  ranks(same));
  }

  void add(const ShardView& view, const std::string& what, const at::Tensor& values) {
    if (view.begin == view.end) return;
    Hasher key;
    key.add(std::string_view(what)).add(std::string_view(view.contract->name));
    const auto& axes = view.contract->layout.axes;
    for (std::size_t i = 0; i < axes.size(); ++i) {
      const bool is_cut = axes[i].parameter.kind == PlacementKind::kShard;
      if (is_cut) key.add(std::string_view(axes[i].axis)).add(std::int64_t{view.coordinates.at(i)});
    }
    put(key.add(view.begin).add(view.end), what + printable(view.contract->name), hash_of(values));
  }
  void put(const Hasher& hasher, const std::string& name, std::uint64_t hash) {
    held_[hasher.digest()] = {name, hash};
  }

  const Mesh& mesh_;
  struct Tensor {
    std::string name;
    std::uint64_t hash = 0;
  };
  std::map<std::uint64_t, Tensor> held_;
};

}  // namespace

void compare_replicas(const ShardedBase& model, const Optimizer& optimizer, const BatchSource& data,
                      const std::vector<RowRange>& rows, std::int64_t step) {
  const Held held(model, optimizer, hash_of(data, rows, step));
  std::string mine;
  for (const auto axis :
       {axis::kReplicate, axis::kShard, axis::kContext, axis::kTensor, axis::kPipeline}) {
    for (const std::string& line : held.differing_on(axis)) mine += line + "\n";
  }
  const auto lines = lines_of_ranks(model, mine, "differing replicas");
  if (lines.empty()) return;
  constexpr std::size_t kShown = 8;
  std::string shown;
  for (std::size_t i = 0; i < std::min(lines.size(), kShown); ++i) shown += lines[i] + "; ";
  throw FoundProblems(
      ErrorKind::kContract,
      concat("debug.guard: step ", step, ": found ", lines.size(),
             " tensors that differ between ranks that must have the same: ", shown,
             lines.size() > kShown ? "...; " : "",
             "expected the same bits: a sum left a rank out, or a rank's memory or data is "
             "damaged. Resume from the last checkpoint before, and set debug.check_placements = "
             "true if it comes back"));
}

}  // namespace tessera::train
