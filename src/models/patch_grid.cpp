#include "models/patch_grid.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "comm/host_read.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

struct Patch {
  std::int64_t x, y, number;
};

/// The patches of one image that are no padding. `positions` [P, 2].
std::vector<Patch> real_patches(const std::int64_t* positions, std::int64_t count,
                                std::int64_t image, std::int64_t table_size) {
  std::vector<Patch> patches;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t x = positions[2 * i];
    const std::int64_t y = positions[2 * i + 1];
    if (x == -1 && y == -1) continue;
    TESSERA_CHECK(x >= 0 && y >= 0 && x < table_size && y < table_size, ErrorKind::kFormat,
                  "image_position_ids of image ", image, ": found (", x, ", ", y, ") at patch ", i,
                  ", expected two numbers from 0 to ", table_size - 1, ", or (-1, -1) for padding");
    patches.push_back({x, y, image * count + i});
  }
  TESSERA_CHECK(!patches.empty(), ErrorKind::kFormat, "image_position_ids of image ", image,
                ": found only padding, expected patches; leave the image out");
  return patches;
}

/// Appends the k*k patches of every cell, cells row-major; returns how many cells.
std::int64_t add_cells(const std::vector<Patch>& patches, std::int64_t image, std::int64_t k,
                       std::vector<std::int64_t>& numbers) {
  std::int64_t width = 0;
  std::int64_t height = 0;
  for (const Patch& patch : patches) {
    width = std::max(width, patch.x + 1);
    height = std::max(height, patch.y + 1);
  }
  const auto count = static_cast<std::int64_t>(patches.size());
  TESSERA_CHECK(width * height == count && width % k == 0 && height % k == 0, ErrorKind::kFormat,
                "image_position_ids of image ", image, ": found ", count, " patches within ", width,
                " by ", height, ", expected a full rectangle with sides that are multiples of ", k);
  std::vector<std::int64_t> at_place(static_cast<std::size_t>(count), -1);
  for (const Patch& patch : patches) {
    std::int64_t& place = at_place[static_cast<std::size_t>(patch.y * width + patch.x)];
    TESSERA_CHECK(place == -1, ErrorKind::kFormat, "image_position_ids of image ", image,
                  ": found (", patch.x, ", ", patch.y, ") twice, expected every position once");
    place = patch.number;
  }
  if (k == 1) {
    for (const Patch& patch : patches) numbers.push_back(patch.number);
    return count;
  }
  for (std::int64_t cell_y = 0; cell_y < height; cell_y += k) {
    for (std::int64_t cell_x = 0; cell_x < width; cell_x += k) {
      for (std::int64_t i = 0; i < k * k; ++i) {
        const std::int64_t place = (cell_y + i / k) * width + cell_x + i % k;
        numbers.push_back(at_place[static_cast<std::size_t>(place)]);
      }
    }
  }
  return count / (k * k);
}

}  // namespace

PatchGrid patch_grid(const at::Tensor& position_ids, const ImagePatches& patches) {
  TESSERA_CHECK(position_ids.dim() == 3 && position_ids.size(2) == 2 &&
                    position_ids.scalar_type() == at::kLong,
                ErrorKind::kFormat, "image_position_ids: found ", position_ids.scalar_type(), " ",
                position_ids.sizes(), ", expected int64 [images, patches, 2]");
  const std::int64_t k = patches.pooling_kernel_size;
  const std::int64_t count = position_ids.size(1);
  TESSERA_CHECK(count % (k * k) == 0, ErrorKind::kFormat, "image_position_ids: found ", count,
                " patches an image, expected a multiple of pooling_kernel_size^2 = ", k * k);
  const at::Tensor on_host = comm::read_on_host(position_ids, "places of patches").contiguous();
  const auto* positions = on_host.const_data_ptr<std::int64_t>();
  PatchGrid grid;
  std::vector<std::int64_t> numbers;
  for (std::int64_t image = 0; image < position_ids.size(0); ++image) {
    const auto real =
        real_patches(positions + image * count * 2, count, image, patches.position_embedding_size);
    grid.tokens.push_back(add_cells(real, image, k, numbers));
  }
  const at::Tensor flat = at::empty({static_cast<std::int64_t>(numbers.size())}, at::kLong);
  std::ranges::copy(numbers, flat.mutable_data_ptr<std::int64_t>());
  grid.patches = comm::uploaded(flat.view({flat.numel() / (k * k), k * k}), position_ids.device());
  return grid;
}

}  // namespace tessera::models
