// Boxes of tensors: every range of every box is what indexing finds, in few calls.
#include <cstring>
#include <random>

#include "io/checkpoint_folder.h"
#include "io/hf_folder.h"
#include "io/tensor_source.h"
#include "support/temporary_folder.h"
#include "unit/io/checkpoint_cases.h"

namespace tessera::read_box_test {
namespace {

/// One tensor of int32 whose elements are their own positions; counts reads.
class Counted final : public TensorSource {
 public:
  explicit Counted(std::vector<std::int64_t> shape) {
    tensors_["t"] = {DType::kInt32, std::move(shape), DType::kInt32};
  }
  const std::filesystem::path& path() const override { return path_; }
  const Tensors& tensors() const override { return tensors_; }
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override {
    ASSERT_LE(end, find(name)->numel());
    ASSERT_EQ(out.size(), static_cast<std::size_t>(end - begin) * sizeof(std::int32_t));
    for (std::int64_t i = begin; i < end; ++i) {
      const auto value = static_cast<std::int32_t>(i);
      std::memcpy(out.data() + (i - begin) * 4, &value, sizeof value);
    }
    ++reads;
    elements += end - begin;
  }
  mutable int reads = 0;
  mutable std::int64_t elements = 0;

 private:
  std::filesystem::path path_ = "somewhere";
  Tensors tensors_;
};

std::vector<std::int32_t> read(const TensorSource& source, const TensorBox& box, std::int64_t begin,
                               std::int64_t end) {
  std::vector<std::int32_t> found(static_cast<std::size_t>(end - begin));
  read_box(source, "t", box, begin, end, std::as_writable_bytes(std::span(found)));
  return found;
}

TEST(ReadBox, EveryRangeOfEveryBoxIsWhatIndexingFinds) {
  std::mt19937_64 random(7);
  const auto below = [&](std::int64_t most) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most));
  };
  for (int i = 0; i < 500; ++i) {
    std::vector<std::int64_t> shape;
    TensorBox box;
    for (std::int64_t d = 0, dims = 1 + below(4); d < dims; ++d) {
      shape.push_back(1 + below(6));
      box.size.push_back(1 + below(shape.back()));
      box.offset.push_back(below(shape.back() - box.size.back() + 1));
    }
    const Counted source(shape);
    const std::int64_t begin = below(box.numel() + 1);
    const std::int64_t end = begin + below(box.numel() - begin + 1);
    const auto found = read(source, box, begin, end);
    for (std::int64_t j = begin; j < end; ++j) {
      ASSERT_EQ(found[static_cast<std::size_t>(j - begin)], position_in_tensor(box, shape, j));
    }
  }
}

TEST(ReadBox, RowsThatLieTogetherAreOneCall) {
  const Counted close({64, 32});
  read(close, {{8, 16}, {48, 16}}, 5, 48 * 16);
  EXPECT_EQ(close.reads, 1);
  const Counted whole({1000, 3000});
  read(whole, TensorBox::whole(std::vector<std::int64_t>{1000, 3000}), 1, 2'999'999);
  EXPECT_EQ(whole.reads, 1) << "what is contiguous goes straight to its place, however much it is";
}

// Naive: a row of 512 KiB between two wanted ones is read for nothing, or all of the tensor at
// once.
TEST(ReadBox, RowsThatLieFarApartAreReadAlone) {
  const Counted far({8, 200'000});
  const TensorBox box{{0, 10}, {8, 5}};
  const auto found = read(far, box, 0, 40);
  EXPECT_EQ(found.back(), 7 * 200'000 + 14);
  EXPECT_EQ(far.reads, 8);
  EXPECT_EQ(far.elements, 40);
  const Counted many({4000, 10'000});
  read(many, {{0, 0}, {4000, 100}}, 0, 400'000);
  EXPECT_GT(many.reads, 30) << "at most 4 MiB of 160 MB are held";
  EXPECT_LT(many.reads, 60);
}

TEST(ReadBox, RefusesWhatIsNotThere) {
  const Counted source({4, 4});
  EXPECT_REFUSED(kInternal, read(source, {{0, 2}, {4, 3}}, 0, 1));
  EXPECT_REFUSED(kInternal, read(source, {{0}, {4}}, 0, 1));
  error_of(ErrorKind::kFormat, [&] {
    std::int32_t one = 0;
    read_box(source, "absent", {{0, 0}, {4, 4}}, 0, 1, std::as_writable_bytes(std::span(&one, 1)));
  });
}

// Tensors of folders and of checkpoints as sources that are read in ranges.

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
  EXPECT_REFUSED(kFormat, source.read("absent", 0, 0, {}));
}

TEST(CheckpointTensors, AreTheModelsUnderItsNamesWithWhatTheyWerePublishedAs) {
  const TemporaryFolder folder;
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
}  // namespace tessera::read_box_test
