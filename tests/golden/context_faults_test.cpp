// Faults of context parallelism that are no step's: they are refused before it, or when its results
// are written. The table is docs/context.md.
#include <ATen/ops/zeros.h>

#include <memory>
#include <optional>

#include "base/test_hooks.h"
#include "golden/faults.h"
#include "layout/context_cut.h"
#include "models/context/context_inputs.h"
#include "support/test.h"

namespace tessera::golden::context_faults_test {
namespace {

using Rows = std::shared_ptr<const nn::ContextRows>;

TEST(ContextFaults, ACutOfRowsOfAnotherLengthIsRefused) {
  models::ModelInputs batch;
  batch.input_ids = at::zeros({2, 24}, at::kLong);
  nn::ContextRegion region{.parts = 4};
  region.axis.size = 2;
  batch.cut = layout::head_tail(24, 2, 4);
  EXPECT_EQ(models::context_rows(batch, region)->places.numel(), 12);
  for (const auto& other : {layout::head_tail(48, 2, 4), layout::head_tail(24, 4, 8)}) {
    batch.cut = other;
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { models::context_rows(batch, region); }),
                Says("expected one of these rows"));
  }
}

/// In the pass for logits, which comes first of two, the second rank says that it has the positions
/// of the first one: its own are taken for copies.
void drop_second_pieces(const Mesh& /*mesh*/, const train::MicroBatch& /*batch*/) {
  static thread_local std::optional<test_hooks::Set<decltype(test_hooks::context_rows)>> held;
  if (held) {
    held.reset();
    return;
  }
  held.emplace(test_hooks::context_rows,
               [asked = 0](const models::ModelInputs& batch, const Rows& rows) mutable -> Rows {
                 const bool is_first_rank = rows->numbers->front() == 0;
                 if (asked++ > 0 || is_first_rank) return rows;  // later ones: of the forward
                 layout::ContextCut cut = rows->cut;
                 for (int& owner : cut.owner) owner = 1 - owner;
                 return nn::context_rows(cut, 1, batch.input_ids.device());
               });
}

TEST(ContextFaults, LogitsWithoutTheSecondPieceAreRefused) {
  const Degrees degrees{.cp = 2};
  const auto run = [&] {
    return run_gradients(config_for(kDense, degrees), layout_of(degrees),
                         Reference::of(kDense).batches());
  };
  EXPECT_TRUE(run().logits.defined());
  const test_hooks::Set dropped(test_hooks::took_micro_batch, drop_second_pieces);
  EXPECT_THAT(error_of(ErrorKind::kUsage, run), Says("was written not at all"));
}

}  // namespace
}  // namespace tessera::golden::context_faults_test
