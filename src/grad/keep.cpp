#include "tessera/keep.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "base/pass_local.h"
#include "grad/keep.h"
#include "grad/region.h"
#include "tessera/error.h"

namespace tessera {
namespace grad {
namespace {

KeptResults*& open_results(CheckpointRun run) {
  return run == CheckpointRun::kFirst
             ? base::PassLocal<base::PassValue::kKeptFirst, KeptResults*>::here()
             : base::PassLocal<base::PassValue::kKeptAgain, KeptResults*>::here();
}

at::Tensor next_kept_of(KeptResults& results, at::IntArrayRef sizes) {
  TESSERA_CHECK(results.next_kept < results.kept.size(), ErrorKind::kUsage,
                "recomputation: found more calls of keep() than the ", results.kept.size(),
                " of the first forward, expected the same", kMakeDeterministic);
  at::Tensor value = std::exchange(results.kept[results.next_kept++].value, {});
  TESSERA_CHECK(value.sizes() == sizes, ErrorKind::kUsage, "recomputation: found keep() of sizes ",
                sizes, ", expected ", value.sizes(), " as in the first forward",
                kMakeDeterministic);
  return value;
}

}  // namespace

bool is_recomputing() { return open_results(CheckpointRun::kAgain) != nullptr; }

KeptResults* kept_results(CheckpointRun run) {
  auto* results = open_results(run);
  return results != nullptr && results->mode == RecomputeMode::kSelective ? results : nullptr;
}

at::Tensor next_kept(at::IntArrayRef sizes) {
  return next_kept_of(*kept_results(CheckpointRun::kAgain), sizes);
}

void add_kept(const at::Tensor& value) {
  kept_results(CheckpointRun::kFirst)->kept.push_back({value, value._version()});
}

KeepScope::KeepScope(KeptResults& results, CheckpointRun run)
    : run_(run), outer_(std::exchange(open_results(run), &results)) {
  if (run == CheckpointRun::kAgain) results.next_kept = 0;
}
KeepScope::~KeepScope() { open_results(run_) = outer_; }

}  // namespace grad

at::Tensor keep(at::IntArrayRef sizes, c10::function_ref<at::Tensor()> compute) {
  TESSERA_CHECK(!c10::GradMode::is_enabled(), ErrorKind::kUsage,
                "keep: found grad mode, expected none, since no gradient goes through it; call it "
                "in the forward of a torch::autograd::Function");
  auto* again = grad::kept_results(grad::CheckpointRun::kAgain);
  const auto* first = grad::kept_results(grad::CheckpointRun::kFirst);
  const at::Tensor value = again != nullptr ? grad::next_kept_of(*again, sizes) : compute();
  auto* recording = grad::recording();
  if (recording != nullptr && again != nullptr) {
    recording->keep(value, grad::CheckpointRun::kAgain);
  }
  if (first != nullptr) {
    TESSERA_CHECK(value.sizes() == sizes, ErrorKind::kUsage, "keep: found a result of sizes ",
                  value.sizes(), ", expected ", sizes);
    grad::add_kept(value);
    if (recording != nullptr) recording->keep(value, grad::CheckpointRun::kFirst);
  }
  return value;
}

}  // namespace tessera
