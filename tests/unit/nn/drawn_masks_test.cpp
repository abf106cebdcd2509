// Attention's kernels under drawn masks against all pairs: documents, windows, chunks, images read
// both ways and sinks, together as families have them.
#include "unit/nn/drawn_masks.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "nn/attention/attention.h"
#include "support/test.h"
#include "unit/nn/compare.h"

namespace tessera::nn::drawn_masks_test {
namespace {

using drawn::Draw;
using drawn::DrawnMask;
using Tensors = std::vector<at::Tensor>;

constexpr double kScale = 0.4;

at::Tensor by_kernels(const Tensors& in, const DrawnMask& drawn) {
  AttentionMask mask = drawn.mask(in[0].scalar_type());
  if (!mask.sinks.defined()) return causal_attention(in[0], in[1], in[2], kScale, mask);
  mask.sinks = in[3];
  return windowed_attention(in[0], in[1].squeeze(3), drawn::values_by_group(in[2], in[0].size(1)),
                            mask, kScale);
}

constexpr std::uint64_t kSeeds = 80;

struct DrawnCase {
  drawn::DrawnSizes sizes;
  DrawnMask mask;
};

DrawnCase drawn_case(Draw& draw) {
  constexpr std::int64_t kPositions[] = {1, 23, 64, 130, 200};
  DrawnCase one{drawn::drawn_sizes(draw), {}};
  const std::int64_t positions = kPositions[draw.between(0, 4)];
  const std::int64_t rows = draw.between(1, 2);
  one.mask = drawn::drawn_mask(draw, rows, positions, one.sizes.groups * one.sizes.repeat);
  return one;
}

// fp64 has 2^-53 a rounding: what differs by more than 1e-11 is another mask. fp32: sums of some
// hundred products, in another order.
TEST(DrawnMasks, KernelsSeeThePairsThatTheMaskHas) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // products this small are slower on several
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Draw draw(seed);
    const DrawnCase one = drawn_case(draw);
    const DrawnMask& mask = one.mask;
    const at::ScalarType dtype = draw.one_in(2) ? at::kDouble : at::kFloat;
    const Bound bound = dtype == at::kDouble ? Bound{1e-11, 1e-11} : Bound{2e-6, 4e-6};
    expect_equals_composite(
        [&](const Tensors& in) { return by_kernels(in, mask); },
        [&](const Tensors& in) { return drawn::attention_by_pairs(in, mask, kScale); },
        drawn::drawn_inputs(draw, mask, one.sizes, dtype), bound,
        concat("seed ", seed, ": ", drawn::text_of(mask), ", ", c10::toString(dtype)));
  }
  at::set_num_threads(threads);
}

std::int64_t pairs_of(const DrawnMask& mask) { return mask.visible().sum().item<std::int64_t>(); }

// Each kind by a count that follows from its definition.
TEST(DrawnMasks, PairsAreThoseOfTheDefinition) {
  const at::Tensor starts = at::tensor({0, 0, 0, 3, 3, 3, 3, 3}, at::kLong).view({1, 8});
  EXPECT_EQ(pairs_of({.rows = 2, .positions = 8}), 2 * 36);
  EXPECT_EQ(pairs_of({.rows = 1, .positions = 8, .window = 3}), 1 + 2 + 6 * 3);
  EXPECT_EQ(pairs_of({.rows = 1, .positions = 8, .chunk = 3}), 6 + 6 + 3);
  EXPECT_EQ(pairs_of({.rows = 1, .positions = 8, .documents = {starts}}), 6 + 15);
  EXPECT_EQ(pairs_of({.rows = 1, .positions = 8, .chunk = 2, .documents = {starts}}),
            (3 + 1) + (3 + 3 + 1));
  const at::Tensor images =
      at::tensor({0, 1, 1, 1, 1, 0, 0, 0}, at::kInt).to(at::kBool).view({1, 8});
  // The run of images is cut by the border of documents: 1 pair more in either.
  EXPECT_EQ(pairs_of({.rows = 1, .positions = 8, .documents = {starts}, .images = images}),
            6 + 1 + 15 + 1);
}

// The seeds above have every kind, alone and with documents.
TEST(DrawnMasks, SeedsHaveEveryKind) {
  std::map<std::string, int> kinds;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Draw draw(seed);
    const DrawnMask mask = drawn_case(draw).mask;
    ++kinds[concat(mask.documents.are_packed() ? "packed" : "one document",
                   mask.window ? ", window" : "", mask.chunk ? ", chunk" : "",
                   mask.images.defined() ? ", images" : "", mask.sinks.defined() ? ", sinks" : "")];
  }
  for (const char* rows : {"one document", "packed"}) {
    for (const char* kind : {"", ", window", ", chunk", ", images", ", window, images"}) {
      EXPECT_GT(kinds[concat(rows, kind)], 0) << rows << kind;
    }
  }
  EXPECT_GT(kinds["one document, window, sinks"] + kinds["packed, window, sinks"], 0);
}

}  // namespace
}  // namespace tessera::nn::drawn_masks_test
