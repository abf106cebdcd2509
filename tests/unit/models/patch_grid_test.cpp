#include "models/patch_grid.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tessera/error.h"

namespace tessera::models::patch_grid_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ImagePatches patches(std::int64_t kernel) {
  return {.patch_size = 16, .pooling_kernel_size = kernel, .position_embedding_size = 8};
}

/// One image a list of x, y, x, y, ...
at::Tensor positions(const std::vector<std::vector<std::int64_t>>& images) {
  std::vector<at::Tensor> rows;
  for (const auto& image : images) rows.push_back(at::tensor(image, at::kLong).view({-1, 2}));
  return at::stack(rows);
}

std::vector<std::int64_t> flat(const at::Tensor& tensor) {
  const at::Tensor one = tensor.contiguous();
  const auto* data = one.const_data_ptr<std::int64_t>();
  return {data, data + one.numel()};
}

std::string refusal(const at::Tensor& ids, std::int64_t kernel) {
  try {
    patch_grid(ids, patches(kernel));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    return error.what();
  }
  return "";
}

TEST(PatchGrid, CellsAreRowMajorWhateverTheOrderOfPatches) {
  // 4 by 2 patches, columns first, padding in between; then a 2 by 2 image.
  const auto ids = positions(
      {{0, 0, 0, 1, 1, 0, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1, 2, 0, 2, 1, 3, 0, 3, 1},
       {1, 1, 0, 1, 1, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}});
  const PatchGrid grid = patch_grid(ids, patches(2));
  EXPECT_THAT(grid.tokens, ElementsAre(2, 1));
  EXPECT_THAT(flat(grid.patches), ElementsAre(0, 2, 1, 3, 8, 10, 9, 11, 15, 14, 13, 12));
}

TEST(PatchGrid, WithoutPoolingPatchesStayAsTheyCome) {
  const PatchGrid grid = patch_grid(positions({{1, 0, -1, -1, 0, 0}}), patches(1));
  EXPECT_THAT(grid.tokens, ElementsAre(2));
  EXPECT_THAT(flat(grid.patches), ElementsAre(0, 2));
}

TEST(PatchGrid, NoImagesMakeNoTokens) {
  const PatchGrid grid = patch_grid(at::empty({0, 4, 2}, at::kLong), patches(2));
  EXPECT_TRUE(grid.tokens.empty());
  EXPECT_EQ(grid.patches.sizes(), (std::vector<std::int64_t>{0, 4}));
}

TEST(PatchGrid, WrongImagesAreRefusedWithTheirNumber) {
  const std::vector<std::int64_t> good{0, 0, 1, 0, 0, 1, 1, 1};
  EXPECT_EQ(refusal(positions({good}), 2), "");
  EXPECT_THAT(refusal(positions({good, {0, 0, 1, 0, 0, 1, -1, -1}}), 2),
              HasSubstr("image 1: found 3 patches within 2 by 2"));
  EXPECT_THAT(refusal(positions({{0, 0, 1, 0, 2, 0, 3, 0}}), 2), HasSubstr("within 4 by 1"));
  EXPECT_THAT(refusal(positions({{1, 1, 1, 0, 0, 1, 0, 1}}), 2), HasSubstr("(0, 1) twice"));
  EXPECT_THAT(refusal(positions({good, {-1, -1, -1, -1, -1, -1, -1, -1}}), 2),
              HasSubstr("image 1: found only padding"));
  EXPECT_THAT(refusal(positions({{0, 0, 1, 0, 0, 1, 1, -1}}), 2), HasSubstr("(1, -1) at patch 3"));
  EXPECT_THAT(refusal(positions({{0, 0, 1, 0, 0, 1, 8, 1}}), 2), HasSubstr("0 to 7"));
  EXPECT_THAT(refusal(positions({{0, 0, 1, 0}}), 2), HasSubstr("multiple of pooling_kernel_size"));
  EXPECT_THAT(refusal(positions({good}).to(at::kInt), 2), HasSubstr("expected int64"));
}

}  // namespace
}  // namespace tessera::models::patch_grid_test
