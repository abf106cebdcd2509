// Rows of a .safetensors file of batches: which step takes which, and which files are refused.
#include <numeric>

#include "io/safetensors.h"
#include "support/temporary_folder.h"
#include "tessera/log_level.h"
#include "unit/train/data/batch_request.h"

namespace tessera::train::replayed_batches_test {
namespace {

void write_ids(
    const std::filesystem::path& path,
    const std::vector<std::pair<std::string, std::pair<std::vector<std::int64_t>, Ids>>>& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, content] : tensors) specs.push_back({name, DType::kInt64, content.first});
  SafetensorsWriter writer(path, specs);
  for (const auto& [name, content] : tensors) {
    writer.write(name, std::as_bytes(std::span(content.second)));
  }
  writer.finish();
}

TEST(ReplayedBatches, TakesStepsWhereTheyAreAndBeginsAgain) {
  const TemporaryFolder folder;
  write_ids(folder / "b.safetensors", {{"input_ids", {{1, 2}, {9, 9}}},
                                       {"labels", {{1, 2}, {9, 9}}},
                                       {"steps/input_ids", {{2, 1, 3}, {1, 2, 3, 4, 5, 6}}},
                                       {"steps/labels", {{2, 1, 3}, {1, -100, 3, 4, 5, 6}}}});
  const auto batches = open_batches(request_for(folder / "b.safetensors"));
  EXPECT_EQ(batches->rows_in_step(), 1);
  EXPECT_EQ(batches->row_tokens(), 3);
  EXPECT_EQ(values(batches->load(1, {0, 1}).input_ids), (Ids{1, 2, 3}));
  EXPECT_EQ(values(batches->load(1, {0, 1}).targets), (Ids{-100, 3, -100}));
  EXPECT_EQ(values(batches->load(2, {0, 1}).targets), (Ids{5, 6, -100}));
  EXPECT_EQ(values(batches->load(3, {0, 1}).input_ids), (Ids{1, 2, 3}));
  const auto gradients = open_gradients_batch((folder / "b.safetensors").string(),
                                              {.size = 10, .reads_bytes = false}, {});
  EXPECT_EQ(values(gradients->load(1, {0, 1}).input_ids), (Ids{9, 9}));
}

// Naive: rows that were padded train on their padding, and nothing says that the mask is not read.
TEST(ReplayedBatches, TensorsThatNothingReadsAreNamedOnce) {
  const TemporaryFolder folder;
  const auto said = [&](const std::vector<std::string>& more, const Vocabulary& vocabulary) {
    std::vector<std::pair<std::string, std::pair<std::vector<std::int64_t>, Ids>>> tensors;
    for (const std::string& name : more) tensors.push_back({name, {{1, 2}, {1, 1}}});
    tensors.push_back({"input_ids", {{1, 2}, {1, 2}}});
    tensors.push_back({"labels", {{1, 2}, {1, 2}}});
    write_ids(folder / "b.safetensors", tensors);
    BatchRequest request = request_for(folder / "b.safetensors");
    request.vocabulary = vocabulary;
    set_log_level(LogLevel::kWarn);
    ::testing::internal::CaptureStderr();
    const auto batches = open_batches(request);
    batches->load(1, {0, 1});
    batches->load(2, {0, 1});
    return ::testing::internal::GetCapturedStderr();
  };
  const Vocabulary text{.size = 300, .reads_bytes = true};
  const std::string of_two = said({"grad/a", "position_ids", "attention_mask"}, text);
  EXPECT_THAT(of_two, Says("b.safetensors': found 3 tensor(s) that are not read: "
                           "'attention_mask, position_ids, grad/a'"));
  EXPECT_EQ(std::ranges::count(of_two, '\n'), 1);
  EXPECT_EQ(said({"steps/input_ids", "steps/labels", "router/0/indices"}, text), "");
  EXPECT_THAT(said({"mm_token_type_ids"}, text), Says("'mm_token_type_ids'"));
  Vocabulary images = text;
  images.images = models::ImageTokens{.id = 299, .patches = {}};
  EXPECT_EQ(said({"mm_token_type_ids"}, images), "");
}

// A label that nothing predicts is no claim about the vocabulary.
TEST(ReplayedBatches, TheFirstColumnOfLabelsMayHoldAnything) {
  const TemporaryFolder folder;
  write_ids(folder / "b.safetensors",
            {{"input_ids", {{1, 3}, {1, 2, 3}}}, {"labels", {{1, 3}, {1 << 30, 2, 3}}}});
  EXPECT_EQ(open_batches(request_for(folder / "b.safetensors"))->load(1, {0, 1}).unmasked_targets(),
            2);
}

TEST(ReplayedBatches, RowsOfABatchAreLoadedByRange) {
  const TemporaryFolder folder;
  Ids ids(2 * 3 * 4);
  std::iota(ids.begin(), ids.end(), 0);
  write_ids(folder / "b.safetensors",
            {{"input_ids", {{2, 3, 4}, ids}}, {"labels", {{2, 3, 4}, ids}}});
  const auto batches = open_batches(request_for(folder / "b.safetensors"));
  EXPECT_EQ(values(batches->load(2, {1, 3}).input_ids), (Ids{16, 17, 18, 19, 20, 21, 22, 23}));
  EXPECT_EQ(values(batches->load(2, {1, 3}).targets), (Ids{17, 18, 19, -100, 21, 22, 23, -100}));
  EXPECT_EQ(batches->load(2, {3, 3}).targets.sizes(), (at::IntArrayRef{0, 4}));
  EXPECT_THAT(
      error_of(
          ErrorKind::kFormat,
          [&] { open_gradients_batch((folder / "b.safetensors").string(), {.size = 99}, {}); }),
      Says("found 2 batches"));
}

TEST(ReplayedBatches, SizesThatAreGivenMustAgree) {
  const TemporaryFolder folder;
  write_ids(folder / "b.safetensors",
            {{"input_ids", {{2, 2}, {1, 2, 3, 4}}}, {"labels", {{2, 2}, {1, 2, 3, 4}}}});
  BatchRequest request = request_for(folder / "b.safetensors", 2);
  request.training.global_batch_size = 2;
  EXPECT_NO_THROW(open_batches(request));
  request.training.seq_len = 3;
  EXPECT_REFUSED(kConfig, open_batches(request), "training.seq_len: found 3, expected 2");
  request.training.seq_len.reset();
  request.training.global_batch_size = 4;
  EXPECT_REFUSED(kConfig, open_batches(request), "training.global_batch_size: found 4, expected 2");
}

struct BadBatch {
  std::string name;
  std::vector<std::int64_t> input_shape, label_shape;
  Ids inputs, labels;
  std::string says;
};

class BadBatchFiles : public ::testing::TestWithParam<BadBatch> {};

TEST_P(BadBatchFiles, AreRefused) {
  const BadBatch& bad = GetParam();
  const TemporaryFolder folder;
  write_ids(folder / "b.safetensors",
            {{bad.name, {bad.input_shape, bad.inputs}}, {"labels", {bad.label_shape, bad.labels}}});
  EXPECT_THAT(error_of(ErrorKind::kFormat,
                       [&] {
                         const auto batches = open_batches(request_for(folder / "b.safetensors"));
                         batches->check_labels(1);
                       }),
              Says(bad.says));
  EXPECT_REFUSED(kFormat,
                 open_gradients_batch((folder / "b.safetensors").string(), {.size = 300}, {}));
}

INSTANTIATE_TEST_SUITE_P(
    Files, BadBatchFiles,
    ::testing::Values(
        BadBatch{"inputs", {1, 2}, {1, 2}, {1, 2}, {1, 2}, "found no tensor input_ids"},
        BadBatch{"input_ids", {2}, {2}, {1, 2}, {1, 2}, "found input_ids [2], expected [S,B,T]"},
        BadBatch{"input_ids", {1, 2}, {2, 1}, {1, 2}, {1, 2}, "found labels [2, 1]"},
        BadBatch{"input_ids", {0, 2}, {0, 2}, {}, {}, "at least one row"},
        BadBatch{"input_ids", {1, 2}, {1, 2}, {1, 300}, {1, 2}, "the token id 300"},
        BadBatch{"input_ids", {1, 2}, {1, 2}, {1, -1}, {1, 2}, "the token id -1"},
        BadBatch{"input_ids", {1, 2}, {1, 2}, {1, 2}, {1, -1}, "the label -1"},
        BadBatch{"input_ids", {1, 2}, {1, 2}, {1, 2}, {7, -100}, "no unmasked target"}));

TEST(ReplayedBatches, AnIdOutsideTheVocabularyIsFoundWhereItIsRead) {
  const TemporaryFolder folder;
  write_ids(folder / "b.safetensors",
            {{"input_ids", {{3, 2, 2}, {1, 2, 3, 4, 5, 6, 7, 300, 9, 10, 11, 12}}},
             {"labels", {{3, 2, 2}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, -5}}}});
  const auto batches = open_batches(request_for(folder / "b.safetensors"));
  EXPECT_NO_THROW(batches->check_labels(3));  // the first step has one
  EXPECT_NO_THROW(batches->load(1, {0, 2}));
  EXPECT_NO_THROW(batches->load(2, {0, 1}));
  EXPECT_REFUSED(kFormat, batches->load(2, {1, 2}),
                 "the token id 300 in input_ids (step 2 of the file, row 1, column 1)");
  EXPECT_REFUSED(kFormat, batches->load(3, {0, 2}),
                 "the label -5 in labels (step 3 of the file, row 1, column 1)");
}

TEST(ReplayedBatches, AnImageTokenWithoutItsImageIsFoundWhereItIsRead) {
  const TemporaryFolder folder;
  write_ids(folder / "b.safetensors",
            {{"input_ids", {{1, 2}, {1, 299}}}, {"labels", {{1, 2}, {1, 2}}}});
  BatchRequest request = request_for(folder / "b.safetensors");
  request.vocabulary.images = models::ImageTokens{.id = 299, .patches = {}};
  EXPECT_REFUSED(kFormat, open_batches(request)->load(1, {0, 1}),
                 "an image token (id 299) in input_ids (row 0, column 1) without pixel_values");
}

TEST(ReplayedBatches, ARunNeedsOneStepWithALabel) {
  const TemporaryFolder folder;
  write_ids(folder / "b.safetensors",
            {{"input_ids", {{2, 1, 2}, {1, 2, 3, 4}}}, {"labels", {{2, 1, 2}, {7, -100, 7, 1}}}});
  const auto batches = open_batches(request_for(folder / "b.safetensors"));
  EXPECT_EQ(batches->rows_in_pass(), 2);
  EXPECT_EQ(batches->load(1, {0, 1}).unmasked_targets(), 0);
  EXPECT_NO_THROW(batches->check_labels(2));
  EXPECT_NO_THROW(batches->check_labels(5));
  EXPECT_REFUSED(kFormat, batches->check_labels(1), "no unmasked target in labels of steps 1 to 1");
}

}  // namespace
}  // namespace tessera::train::replayed_batches_test
