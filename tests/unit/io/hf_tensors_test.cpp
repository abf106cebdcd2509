// A folder's tensors as a source that is read in ranges.
#include "io/hf_tensors.h"

#include <gmock/gmock.h>

#include <cstring>

#include "unit/io/temporary_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

TEST(HfTensors, EveryRangeIsThatPartOfTheFile) {
  const fs::path folder = fs::path(TESSERA_TEST_DATA) / "qwen3-mixed/sharded";
  const HfTensors source(HfFolder::open(folder));
  ASSERT_EQ(source.tensors().size(), source.folder().tensors().size());
  for (const auto& [name, tensor] : source.tensors()) {
    const TensorInfo& info = *source.folder().find(name);
    EXPECT_EQ(tensor, (SourceTensor{info.dtype, info.shape, info.dtype}));
    const std::int64_t middle = tensor.numel() / 3;
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, tensor.numel()},
                                     std::pair{middle, middle}, std::pair{middle, middle + 1}}) {
      std::vector<std::byte> found(static_cast<std::size_t>((end - begin) * size_of(tensor.dtype)));
      source.read(name, begin, end, found);
      const auto expected = source.folder().range(name, begin, end);
      ASSERT_EQ(found.size(), expected.size());
      EXPECT_TRUE(std::equal(found.begin(), found.end(), expected.begin())) << name;
    }
  }
  EXPECT_EQ(source.bulk_dtype(), DType::kBFloat16);
  EXPECT_EQ(source.find("absent"), nullptr);
  testing::error_of(ErrorKind::kFormat, [&] { source.read("absent", 0, 0, {}); });
}

}  // namespace
}  // namespace tessera
