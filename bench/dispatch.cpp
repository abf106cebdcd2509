// One token dispatch of a mixture of experts there and back, alone: two Gloo ranks that own half of
// the experts each, at the sizes of a layer of bench/fsdp2_compare --model moe. In addition to it, in
// turns, the bare all-to-alls of the same bytes: ours, and c10d's. Prints a line of JSON for each
// load, medians in ms on rank 0.
//
//   dispatch [ROUNDS]
//
// There and back: counts, rows to their experts, rows back, and both ways again in backward. Bare:
// the four exchanges of rows without counts, orders and autograd.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "comm/group.h"
#include "moe/experts.h"
#include "plain_gloo.h"
#include "tessera/error.h"

namespace {

namespace comm = tessera::comm;
namespace moe = tessera::moe;
using tessera::nn::GroupOffsets;

constexpr std::int64_t kExperts = 16;
constexpr std::int64_t kHidden = 384;
constexpr std::int64_t kRows = std::int64_t{4} * 512;  // 4 experts a token

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// How a rank's rows are spread over the experts.
struct Load {
  const char* name;
  double (*weight)(std::int64_t expert);

  GroupOffsets offsets() const {
    double all = 0;
    for (std::int64_t e = 0; e < kExperts; ++e) all += weight(e);
    GroupOffsets result = {0};
    double reached = 0;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      reached += weight(e);
      result.push_back(std::llround(static_cast<double>(kRows) * reached / all));
    }
    return result;
  }
};
constexpr std::array<Load, 3> kLoads = {
    Load{"even", [](std::int64_t) { return 1.0; }},
    Load{"skewed", [](std::int64_t e) { return 1.0 / static_cast<double>(e + 1); }},
    Load{"all to one rank", [](std::int64_t e) { return e < kExperts / 2 ? 1.0 : 0.0; }}};

/// ms by name.
using Found = std::map<std::string, std::vector<double>>;
constexpr std::array<const char*, 6> kTimes = {"there_and_back", "forward", "counts",
                                               "backward",       "bare",    "bare_c10d"};

/// The rows of each group as a router would have chosen them: one expert a token.
at::Tensor indices_of(const GroupOffsets& offsets) {
  const at::Tensor indices = at::empty({kRows, 1}, at::kLong);
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const auto group = static_cast<std::size_t>(e);
    indices.narrow(0, offsets[group], offsets[group + 1] - offsets[group]).fill_(e);
  }
  return indices;
}

moe::DispatchPlan dispatch_plan_of(const moe::DispatchOptions& dispatch_options,
                                   const GroupOffsets& offsets, const at::Tensor& indices) {
  return moe::plan_dispatch(offsets,
                            moe::exchange_counts({}, indices, kExperts, dispatch_options).back(),
                            dispatch_options, at::kCPU);
}

void there_and_back(const moe::DispatchOptions& dispatch_options, const GroupOffsets& offsets,
                    const at::Tensor& indices, const at::Tensor& rows, const at::Tensor& grad,
                    Found& found) {
  const auto begin = Clock::now();
  const moe::DispatchPlan dispatch_plan = dispatch_plan_of(dispatch_options, offsets, indices);
  const double counts = ms_since(begin);
  const at::Tensor back = moe::from_experts(moe::to_experts(rows, dispatch_plan), dispatch_plan);
  const double forward = ms_since(begin);
  torch::autograd::grad({back}, {rows}, {grad});
  const double whole = ms_since(begin);
  found["counts"].push_back(counts);
  found["forward"].push_back(forward);  // counts too
  found["backward"].push_back(whole - forward);
  found["there_and_back"].push_back(whole);
}

/// Four exchanges of rows: out, back, and the same of their gradients.
class BareExchanges {
 public:
  explicit BareExchanges(const tessera::parallel::Splits& splits)
      : out_(elements(splits)),
        back_(out_.swapped()),
        here_(buffer(out_.sends)),
        there_(buffer(out_.receives)) {}

  void by_group(comm::Group& group) const {
    for (const bool out : {true, false, true, false}) {
      comm::Batch batch;
      batch.label.kind = comm::Kind::kAllToAll;
      batch.label.unit = "bench";
      const tessera::parallel::Splits& splits = out ? out_ : back_;
      batch.ops.emplace_back(comm::AllToAll{out ? here_ : there_, splits.sends,
                                            out ? there_ : here_, splits.receives});
      group.issue(std::move(batch))->wait();
    }
  }
  void by_c10d(c10d::ProcessGroupGloo& gloo) {
    for (const bool out : {true, false, true, false}) {
      // It empties the splits that it is given.
      tessera::parallel::Splits splits = out ? out_ : back_;
      gloo.alltoall_base(out ? there_ : here_, out ? here_ : there_, splits.receives, splits.sends)
          ->wait();
    }
  }
  /// That one rank sends in the four.
  std::int64_t sent_bytes(int rank) const {
    const auto own = static_cast<std::size_t>(rank);
    const std::int64_t out = sum(out_.sends) - out_.sends[own];
    const std::int64_t back = sum(out_.receives) - out_.receives[own];
    return 2 * (out + back) * static_cast<std::int64_t>(here_.element_size());
  }

 private:
  static std::int64_t sum(const std::vector<std::int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  }
  static tessera::parallel::Splits elements(tessera::parallel::Splits splits) {
    for (std::int64_t& count : splits.sends) count *= kHidden;
    for (std::int64_t& count : splits.receives) count *= kHidden;
    return splits;
  }
  /// With a first dim that c10d can split.
  static at::Tensor buffer(const std::vector<std::int64_t>& counts) {
    return at::ones({sum(counts)}, at::kBFloat16);
  }

  tessera::parallel::Splits out_, back_;
  at::Tensor here_, there_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Whether every row came back as it left.
bool measure(tessera::World& world, c10d::ProcessGroupGloo& gloo, const Load& load, int rounds) {
  const auto axis = tessera::parallel::axis_of(
      world.mesh(tessera::MeshShape::sparse(1, 1, 1, world.size(), 1)), tessera::axis::kExpert);
  const GroupOffsets offsets = load.offsets();
  const at::Tensor rows = at::randn({kRows, kHidden}).to(at::kBFloat16).requires_grad_(true);
  const at::Tensor grad = at::ones_like(rows);
  const moe::DispatchOptions dispatch_options{true, axis, "bench"};
  const at::Tensor indices = indices_of(offsets);
  const moe::DispatchPlan dispatch_plan = dispatch_plan_of(dispatch_options, offsets, indices);
  const bool kept =
      at::equal(moe::from_experts(moe::to_experts(rows, dispatch_plan), dispatch_plan), rows);
  BareExchanges bare(dispatch_plan.splits);
  Found found;
  const auto timed = [&](const char* name, auto&& act) {
    comm::barrier(world.control(), "bench");
    const auto begin = Clock::now();
    act();
    found[name].push_back(ms_since(begin));
  };
  for (int round = -3; round < rounds; ++round) {
    if (round == 0) found.clear();
    comm::barrier(world.control(), "bench");
    there_and_back(dispatch_options, offsets, indices, rows, grad, found);
    timed("bare", [&] { bare.by_group(*axis.group); });
    timed("bare_c10d", [&] { bare.by_c10d(gloo); });
  }
  if (world.rank() != 0) return kept;
  std::printf("{\"load\": \"%s\", \"sent_bytes\": %lld, \"rows_here\": %lld", load.name,
              static_cast<long long>(bare.sent_bytes(axis.rank)),
              static_cast<long long>(dispatch_plan.groups.begins.back()));
  for (const char* name : kTimes) std::printf(", \"%s_ms\": %.3f", name, median(found.at(name)));
  std::printf("}\n");
  return kept;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 100;
  return tessera::launch(2, [&](tessera::World& world) {
    at::set_num_threads(1);
    at::manual_seed(0);
    const auto gloo = bench::plain_gloo(world);
    for (const Load& load : kLoads) {
      TESSERA_INVARIANT(measure(world, *gloo, load, rounds), "rows came back changed, load ",
                        load.name);
    }
  });
}
