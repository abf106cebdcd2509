// Which checkpoint this thread is inside of, and keep(), which asks.
#include <c10/core/GradMode.h>

#include <utility>

#include "fsdp/recompute.h"
#include "tessera/error.h"
#include "tessera/recompute.h"

namespace tessera {
namespace fsdp {
namespace {

// A thread is a rank, so this is per rank.
thread_local Recorded* t_first = nullptr;
thread_local Recorded* t_again = nullptr;

}  // namespace

FirstForwardScope::FirstForwardScope(Recorded& recorded) : outer_(t_first) { t_first = &recorded; }
FirstForwardScope::~FirstForwardScope() { t_first = outer_; }
RecomputeScope::RecomputeScope(Recorded& recorded) : outer_(t_again) {
  recorded.next = 0;
  recorded.next_kept = 0;
  t_again = &recorded;
}
RecomputeScope::~RecomputeScope() { t_again = outer_; }
Recorded* first_forward() { return t_first; }
Recorded* recomputing() { return t_again; }

namespace {

at::Tensor take_kept(Recorded& recorded, at::IntArrayRef sizes) {
  TESSERA_CHECK(recorded.next_kept < recorded.kept.size(), ErrorKind::kUsage,
                "recomputation: found more calls of keep() than the ", recorded.kept.size(),
                " of the first forward, expected the same; make the checkpointed function "
                "deterministic");
  at::Tensor value = std::exchange(recorded.kept[recorded.next_kept++].value, {});
  TESSERA_CHECK(value.sizes() == sizes, ErrorKind::kUsage, "recomputation: found keep() of sizes ",
                sizes, ", expected ", value.sizes(),
                " as in the first forward; make the checkpointed function deterministic");
  return value;
}

}  // namespace
}  // namespace fsdp

at::Tensor keep(at::IntArrayRef sizes, c10::function_ref<at::Tensor()> compute) {
  TESSERA_CHECK(!c10::GradMode::is_enabled(), ErrorKind::kUsage,
                "keep: found grad mode, expected none, since no gradient goes through it; call it "
                "in the forward of a torch::autograd::Function");
  auto* again = fsdp::recomputing();
  auto* first = fsdp::first_forward();
  const bool is_kept = again != nullptr && again->mode == RecomputeMode::kSelective;
  const at::Tensor value = is_kept ? fsdp::take_kept(*again, sizes) : compute();
  if (first != nullptr && first->mode == RecomputeMode::kSelective) {
    TESSERA_CHECK(value.sizes() == sizes, ErrorKind::kUsage, "keep: found a result of sizes ",
                  value.sizes(), ", expected ", sizes);
    first->kept.push_back({value, value._version()});
  }
  return value;
}

}  // namespace tessera
