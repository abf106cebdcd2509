// Tensors of folders and of checkpoints as sources that are read in ranges.
#include <gmock/gmock.h>

#include <algorithm>

#include "io/checkpoint_folder.h"
#include "io/hf_folder.h"
#include "unit/io/checkpoint_cases.h"
#include "unit/io/temporary_folder.h"

namespace tessera::tensor_source_test {
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

TEST(CheckpointTensors, AreTheModelsUnderItsNamesWithWhatTheyWerePublishedAs) {
  const testing::TemporaryFolder folder;
  testing::Random random(5);
  for (int i = 0; i < 20; ++i) {
    const auto path = folder / std::to_string(i);
    const auto written = testing::write_random_checkpoint(random, path);
    const CheckpointTensors source(CheckpointFolder::open(path));
    std::size_t of_model = 0;
    for (const auto& [name, tensor] : written.manifest.tensors) {
      if (!name.starts_with(kModelPrefix)) continue;
      ++of_model;
      const std::string plain = name.substr(kModelPrefix.size());
      ASSERT_NE(source.find(plain), nullptr) << plain;
      EXPECT_EQ(*source.find(plain), (SourceTensor{tensor.dtype, tensor.shape,
                                                   tensor.source_dtype.value_or(tensor.dtype)}));
      std::vector<std::byte> found(written.values.at(name).size());
      source.read(plain, 0, tensor.numel(), found);
      EXPECT_EQ(found, written.values.at(name));
    }
    EXPECT_EQ(source.tensors().size(), of_model) << "the optimizer's are not the model's";
    EXPECT_EQ(source.find("model/w"), nullptr);
  }
}

}  // namespace
}  // namespace tessera::tensor_source_test
