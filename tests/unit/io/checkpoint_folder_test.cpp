// Checkpoints on disk: any range out of any pieces, every altered byte found, complete folders.
#include "io/checkpoint_folder.h"

#include "base/text/printable.h"
#include "io/checkpoint_store.h"
#include "io/safetensors.h"
#include "support/temporary_folder.h"
#include "unit/io/checkpoint_cases.h"

namespace tessera::checkpoint_folder_test {
namespace {

namespace fs = std::filesystem;
using testing::pick;
using testing::Random;
using testing::write_random_checkpoint;

void verify_everything(const fs::path& folder) { CheckpointFolder::open(folder).verify_all(); }

/// Which file an error is about: each message begins with its path.
void expect_found(const fs::path& folder, const std::string& file) {
  try {
    verify_everything(folder);
    ADD_FAILURE() << file << " was altered, and nothing was found";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), Says(file));
  }
}

TEST(CheckpointFolder, AnyRangeOfAnyTensorHasItsValues) {
  const TemporaryFolder folder;
  Random random(3);
  for (int i = 0; i < 60; ++i) {
    const auto path = folder / std::to_string(i);
    const auto written = write_random_checkpoint(random, path);
    const auto checkpoint = CheckpointFolder::open(path);
    checkpoint.verify_all();
    EXPECT_EQ(checkpoint.tensors(), written.manifest.tensors);
    EXPECT_EQ(checkpoint.manifest().format, written.manifest.format);
    EXPECT_TRUE(checkpoint.manifest().tensors.empty());
    for (const auto& [name, tensor] : checkpoint.tensors()) {
      const auto size = size_of(tensor.dtype);
      const auto& values = written.values.at(name);
      for (int range = 0; range < 20; ++range) {
        const auto begin = pick(random, 0, tensor.numel());
        const auto end = pick(random, begin, tensor.numel());
        std::vector<std::byte> found(static_cast<std::size_t>((end - begin) * size));
        checkpoint.read(name, begin, end, found);
        EXPECT_TRUE(std::equal(found.begin(), found.end(), values.begin() + begin * size))
            << name << " " << begin << " to " << end;
      }
    }
  }
}

/// Writes a checkpoint of many blocks, in one file of zeros.
std::vector<std::string> write_many_blocks(const fs::path& folder) {
  CheckpointManifest manifest;
  std::vector<TensorSpec> specs;
  for (const char* kept : {"model/", "optim/exp_avg/"}) {
    for (int i = 100; i < 400; ++i) {
      const std::string name = kept + std::string(100, 'x') + std::to_string(i);
      manifest.tensors[name] = {
          DType::kFloat32, {2}, std::nullopt, {{rank_file(0), name, {{0}, {2}}, 0, 2}}};
      specs.push_back({name, DType::kFloat32, {2}});
    }
  }
  fs::create_directories(folder);
  SafetensorsWriter writer(folder / rank_file(0), specs);
  for (const auto& spec : specs) writer.write(spec.name, std::vector<std::byte>(8));
  writer.finish();
  std::ofstream(folder / "config.json") << "{}";
  testing::finish_checkpoint(folder, manifest);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : manifest.tensors) names.push_back(name);
  return names;
}

void flip(const fs::path& file, std::int64_t at) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(at);
  const char before = static_cast<char>(stream.get());
  stream.seekp(at).put(static_cast<char>(before ^ 1));
}

TEST(CheckpointFolder, AReaderParsesTheBlocksThatItAsksFor) {
  const TemporaryFolder folder;
  const auto names = write_many_blocks(folder / "x");
  const auto blocks = CheckpointFolder::open(folder / "x").manifest().blocks;
  ASSERT_GT(blocks.size(), 5U);
  flip(folder / "x" / kTensorsFile, blocks[0].bytes + 1);
  const auto checkpoint = CheckpointFolder::open(folder / "x");
  std::size_t found = 0;
  for (const auto& name : names) {
    if (name < blocks[1].first || name >= blocks[2].first) {
      EXPECT_NE(checkpoint.find(name), nullptr);
      ++found;
      continue;
    }
    EXPECT_REFUSED(kFormat, checkpoint.find(name), "tensors.jsonl", "take another checkpoint");
  }
  EXPECT_LT(found, names.size());
  for (const char* absent : {"", "a", "model/", "model/x", "optim/zzz", "z"}) {
    EXPECT_EQ(checkpoint.find(absent), nullptr) << absent;
  }
  EXPECT_THROW(checkpoint.tensors(), Error);
  EXPECT_THROW(checkpoint.verify_all(), Error);
}

TEST(CheckpointFolder, SharesOfTheNamesAreAllOfThem) {
  const TemporaryFolder folder;
  const auto names = write_many_blocks(folder / "x");
  for (const std::string prefix : {"", "model/", "optim/", "optim/exp_avg/xxx", "none", "z"}) {
    std::vector<std::string> expected;
    std::copy_if(names.begin(), names.end(), std::back_inserter(expected),
                 [&](const auto& name) { return name.starts_with(prefix); });
    for (const std::size_t parts : {1U, 2U, 7U, 50U}) {
      std::vector<std::string> all;
      for (std::size_t part = 0; part < parts; ++part) {
        // Blocks that were read before change nothing.
        const auto checkpoint = CheckpointFolder::open(folder / "x");
        if (part % 2 == 1) checkpoint.tensors();
        const auto share = checkpoint.names(prefix, part, parts);
        all.insert(all.end(), share.begin(), share.end());
      }
      std::sort(all.begin(), all.end());
      EXPECT_EQ(all, expected) << prefix << " in " << parts;
    }
  }
}

TEST(CheckpointFolder, TensorsOfAnotherCheckpointAreRefused) {
  const TemporaryFolder folder;
  write_many_blocks(folder / "x");
  const auto path = folder / "x" / kTensorsFile;
  const auto size = fs::file_size(path);
  const auto refused = [&](ErrorKind kind) {
    return error_of(kind, [&] { CheckpointFolder::open(folder / "x"); });
  };
  fs::resize_file(path, size + 1);
  EXPECT_THAT(refused(ErrorKind::kFormat), Says("tensors.jsonl"));
  fs::resize_file(path, size - 1);
  EXPECT_THAT(refused(ErrorKind::kFormat), Says("tensors.jsonl"));
  fs::remove(path);
  EXPECT_THAT(refused(ErrorKind::kIo), Says("tensors.jsonl"));
  // The text has the right size, but its blocks are in another order.
  std::ofstream(path) << std::string(size, ' ');
  const auto checkpoint = CheckpointFolder::open(folder / "x");
  EXPECT_REFUSED(kFormat, checkpoint.names("model/"), "tensors.jsonl");
}

// A caller that asks for a step by its folder's name gets that step.
TEST(CheckpointFolder, AStepUnderTheNameOfAnotherIsRefused) {
  const TemporaryFolder folder;
  Random random(31);
  const auto step = write_random_checkpoint(random, folder / "any name").manifest.step;
  const auto named = folder / step_folder(step);
  fs::rename(folder / "any name", named);
  EXPECT_EQ(CheckpointFolder::open(named).manifest().step, step);
  const auto other = folder / step_folder(step + 1);
  fs::rename(named, other);
  for (const auto& path : {other, other / ""}) {
    EXPECT_REFUSED(kFormat, CheckpointFolder::open(path), kManifestFile,
                   "found step " + std::to_string(step), "expected " + std::to_string(step + 1));
  }
}

// A reader of whole files keeps what it wants on the way: the same values as read() gives.
TEST(CheckpointFolder, ChunksLeadToTheSameValuesInOnePass) {
  const TemporaryFolder folder;
  Random random(30);
  int in_one_pass = 0;
  for (int i = 0; i < 60; ++i) {
    const auto path = folder / std::to_string(i);
    const auto written = write_random_checkpoint(random, path);
    const auto checkpoint = CheckpointFolder::open(path);
    std::map<std::string, std::vector<WantedBytes>> wanted;
    for (const auto& file : checkpoint.data_files()) wanted[file] = {};
    std::map<std::string, std::vector<std::byte>> found;
    for (const auto& [name, values] : written.values) {
      const auto size = static_cast<std::size_t>(size_of(checkpoint.find(name)->dtype));
      const auto numel = checkpoint.find(name)->numel();
      const auto chunks =
          checkpoint.chunks(name, TensorBox::whole(checkpoint.find(name)->shape), 0, numel);
      if (chunks.empty()) continue;
      auto& bytes = found[name];
      bytes.resize(values.size());
      for (const auto& one : chunks) {
        wanted[one.file].push_back(
            {one.offset,
             std::span(bytes).subspan(static_cast<std::size_t>(one.elements.begin) * size,
                                      static_cast<std::size_t>(one.elements.size()) * size)});
      }
    }
    for (auto& [file, bytes] : wanted) checkpoint.verify(file, bytes);
    for (const auto& [name, bytes] : found) {
      EXPECT_TRUE(bytes == written.values.at(name)) << name;
      ++in_one_pass;
    }
  }
  EXPECT_GT(in_one_pass, 60);
}

/// One of those that the tensor was written in, or any other.
TensorBox some_box(Random& random, const CheckpointTensor& tensor) {
  if (random() % 2 == 0) return tensor.pieces[random() % tensor.pieces.size()].box;
  TensorBox box;
  for (const std::int64_t size : tensor.shape) {
    box.size.push_back(testing::pick(random, 1, size));
    box.offset.push_back(testing::pick(random, 0, size - box.size.back()));
  }
  return box;
}

// Naive: a range of a box is taken for a range of the tensor.
TEST(CheckpointFolder, ARangeOfABoxReadsWhatIndexingFindsHoweverItWasWritten) {
  const TemporaryFolder folder;
  Random random(31);
  int in_one_pass = 0;
  for (int i = 0; i < 60; ++i) {
    const auto path = folder / std::to_string(i);
    const auto written = write_random_checkpoint(random, path);
    const auto checkpoint = CheckpointFolder::open(path);
    for (const auto& [name, values] : written.values) {
      const CheckpointTensor& tensor = *checkpoint.find(name);
      if (tensor.numel() == 0) continue;
      const TensorBox box = some_box(random, tensor);
      const std::int64_t begin = testing::pick(random, 0, box.numel() - 1);
      const std::int64_t end = testing::pick(random, begin + 1, box.numel());
      const std::int64_t size = size_of(tensor.dtype);
      std::vector<std::byte> expected;
      for (std::int64_t j = begin; j < end; ++j) {
        const auto* from = values.data() + position_in_tensor(box, tensor.shape, j) * size;
        expected.insert(expected.end(), from, from + size);
      }
      std::vector<std::byte> found(expected.size());
      checkpoint.read_box(name, box, begin, end, found);
      ASSERT_TRUE(found == expected) << name;
      const auto chunks = checkpoint.chunks(name, box, begin, end);
      if (chunks.empty()) continue;
      std::fill(found.begin(), found.end(), std::byte{0});
      for (const auto& one : chunks) {
        InputFile(path / one.file)
            .read_range(one.offset,
                        std::span(found).subspan(
                            static_cast<std::size_t>((one.elements.begin - begin) * size),
                            static_cast<std::size_t>(one.elements.size() * size)));
      }
      EXPECT_TRUE(found == expected) << name;
      ++in_one_pass;
    }
  }
  EXPECT_GT(in_one_pass, 100);
}

TEST(HashedFile, LongRunsOfWantedAndUnwantedBytesComeWithTheHashOfAll) {
  const TemporaryFolder folder;
  std::vector<std::byte> content(3'000'000);
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::byte>(i * 31 >> 3);
  const auto path = folder / "file";
  const auto hash = write_hashed_file(path, content);
  EXPECT_EQ(hash, Hash128Stream().add(content).digest());
  const InputFile file(path);
  std::vector<std::byte> late(1'200'000);
  std::vector<std::byte> early(5);
  EXPECT_EQ(read_hashed_file(file, {{1'700'000, late}, {1'000'000, early}}), hash);
  EXPECT_TRUE(std::equal(late.begin(), late.end(), content.begin() + 1'700'000));
  EXPECT_TRUE(std::equal(early.begin(), early.end(), content.begin() + 1'000'000));
  EXPECT_THROW(read_hashed_file(file, {{0, late}, {1'199'999, early}}), Error);
  EXPECT_THROW(read_hashed_file(file, {{2'999'996, early}}), Error);
  EXPECT_THROW(read_hashed_file(file, {{3'000'001, {}}}), Error);
  write_hashed_file(path, {});
  EXPECT_EQ(read_hashed_file(InputFile(path)), Hash128Stream().digest());
}

// Naive: the bytes land in the file that the link leads to.
TEST(HashedFile, ALinkUnderItsNameIsReplaced) {
  const TemporaryFolder folder;
  const auto precious = folder.write("precious", "precious");
  const auto path = folder / "file";
  fs::create_symlink(precious, path);
  const std::string content = "new!";
  write_hashed_file(path, std::as_bytes(std::span(content)));
  EXPECT_FALSE(fs::is_symlink(path));
  EXPECT_EQ(read_text_file(path, 10), "new!");
  EXPECT_EQ(read_text_file(precious, 10), "precious");
}

TEST(CheckpointFolder, RowsLongerThanWhatIsReadAtATimeHaveTheirValues) {
  const TemporaryFolder folder;
  // Two boxes side by side, of 3 rows of 300000 and 100000 elements: several chunks of 1 MiB.
  const std::vector<std::int64_t> shape{3, 400'000};
  CheckpointManifest manifest;
  manifest.format = 1;  // keys of its own
  std::vector<std::int32_t> values(1'200'000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int32_t>(i * 7);
  auto& tensor = manifest.tensors["model/w"];
  tensor = {DType::kInt32, shape, std::nullopt, {}};
  const TensorBox boxes[] = {{{0, 0}, {3, 300'000}}, {{0, 300'000}, {3, 100'000}}};
  std::ofstream(folder / "config.json") << "{}";
  for (int b = 0; b < 2; ++b) {
    const auto file = "rank_" + std::to_string(b) + ".safetensors";
    tensor.pieces.push_back({file, "w", boxes[b], 0, boxes[b].numel()});
    std::vector<std::int32_t> part;
    for (std::int64_t i = 0; i < boxes[b].numel(); ++i) {
      part.push_back(values[static_cast<std::size_t>(position_in_tensor(boxes[b], shape, i))]);
    }
    testing::write_safetensors(folder / file, "w", DType::kInt32, std::as_bytes(std::span(part)));
  }
  testing::finish_checkpoint(folder.path(), manifest);
  const auto checkpoint = CheckpointFolder::open(folder.path());
  std::vector<std::int32_t> found(1'100'001);
  checkpoint.read("model/w", 12'345, 1'112'346, std::as_writable_bytes(std::span(found)));
  EXPECT_TRUE(std::equal(found.begin(), found.end(), values.begin() + 12'345));
}

TEST(CheckpointFolder, EachOfTwoHundredRandomFlippedBitsIsFound) {
  const TemporaryFolder folder;
  Random random(4);
  const auto path = folder / "written";
  do {
    fs::remove_all(path);
    write_random_checkpoint(random, path);
  } while (!fs::exists(path / kTensorsFile));
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path());
  ASSERT_GE(files.size(), 3U);
  for (int i = 0; i < 200; ++i) {
    const auto& file = files[random() % files.size()];
    const auto at = pick(random, 0, static_cast<std::int64_t>(fs::file_size(file)) - 1);
    SCOPED_TRACE(file.string() + " byte " + std::to_string(at));
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(at);
    const char before = static_cast<char>(stream.get());
    const auto put = [&](char value) { stream.seekp(at).put(value).flush(); };
    put(static_cast<char>(before ^ (1 << random() % 8)));
    expect_found(path, file.filename());
    put(before);
  }
  EXPECT_NO_THROW(verify_everything(path));
}

TEST(CheckpointFolder, AMissingOrTornFileIsNamed) {
  Random random(5);
  for (const std::string file :
       {"rank_0.safetensors", "config.json", "manifest.json", "tensors.jsonl"}) {
    const TemporaryFolder folder;
    const auto path = folder / "written";
    do {
      fs::remove_all(path);
      write_random_checkpoint(random, path);
    } while (!fs::exists(path / kTensorsFile));
    fs::resize_file(path / file, fs::file_size(path / file) - 1);
    expect_found(path, file);
    fs::resize_file(path / file, 0);
    expect_found(path, file);
    fs::remove(path / file);
    expect_found(path, file);
  }
}

TEST(CheckpointFolder, FilesThatContradictTheManifestAreRefused) {
  const TemporaryFolder folder;
  std::ofstream(folder / "config.json") << "{}";
  const std::vector<float> values(4);
  testing::write_safetensors(folder / "rank_0.safetensors", "other", DType::kFloat32,
                             std::as_bytes(std::span(values)));
  CheckpointManifest manifest;
  manifest.format = 1;
  manifest.tensors["model/w"] = {
      DType::kFloat32, {4}, std::nullopt, {{"rank_0.safetensors", "w", {{0}, {4}}, 0, 4}}};
  testing::finish_checkpoint(folder.path(), manifest);
  const auto checkpoint = CheckpointFolder::open(folder.path());
  std::vector<std::byte> out(16);
  EXPECT_REFUSED(kFormat, checkpoint.read("model/w", 0, 4, out), "rank_0.safetensors",
                 "found nothing under 'w'");
  EXPECT_REFUSED(kFormat, checkpoint.read("model/v", 0, 4, out), "found no tensor 'model/v'");
  EXPECT_REFUSED(kUsage, checkpoint.read("model/w", 1, 5, out), "'model/w' [4]");
}

TEST(CheckpointFolder, TheFolderAboveGivesItsLatest) {
  const TemporaryFolder folder;
  Random random(6);
  const CheckpointStore store(folder.path());
  EXPECT_FALSE(CheckpointFolder::is_one(folder.path()));
  const auto write = [&] {
    const auto manifest = write_random_checkpoint(random, folder / "written").manifest;
    fs::rename(folder / "written", store.complete(manifest.step));
    return manifest;
  };
  const auto older = write();
  const auto newer = write();
  EXPECT_TRUE(CheckpointFolder::is_one(folder.path())) << "a crash before the first `latest`";
  EXPECT_EQ(CheckpointFolder::open(folder.path()).path(),
            store.complete(std::max(older.step, newer.step)));
  store.set_latest(newer.step);
  EXPECT_TRUE(CheckpointFolder::is_one(folder.path()));
  EXPECT_TRUE(CheckpointFolder::is_one(store.complete(older.step)));
  EXPECT_EQ(CheckpointFolder::open(folder.path()).tensors(), newer.tensors);
  EXPECT_EQ(CheckpointFolder::open(folder.path()).path(), store.complete(newer.step));
}

// One rule for all that look for a checkpoint: the latest, or an error that names the one before it
// that can be opened. Naive: `cannot open manifest.json`, or silently an older one.
TEST(CheckpointFolder, TheLatestIsFoundOrNamesTheNewestWholeOneBeforeIt) {
  const TemporaryFolder folder;
  Random random(7);
  const CheckpointStore store(folder.path());
  EXPECT_EQ(find_checkpoint(folder.path()), std::nullopt);
  EXPECT_EQ(find_checkpoint(folder / "absent"), std::nullopt);
  std::vector<std::int64_t> steps;
  while (steps.size() < 4) {
    const auto step = write_random_checkpoint(random, folder / "written").manifest.step;
    if (fs::exists(store.complete(step))) {
      fs::remove_all(folder / "written");
      continue;
    }
    fs::rename(folder / "written", store.complete(step));
    steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  const auto at = [&](std::size_t i) { return store.complete(steps[i]); };
  EXPECT_EQ(find_checkpoint(folder.path()), at(3));
  EXPECT_EQ(find_checkpoint(at(1)), at(1)) << "a checkpoint stands for itself";
  fs::remove(at(3) / "manifest.json");
  fs::remove(at(2) / "config.json");
  const auto refused = [&] {
    return error_of(ErrorKind::kFormat, [&] { find_checkpoint(folder.path()); });
  };
  EXPECT_THAT(refused(), Says(shown(at(3)) + ": found no manifest.json",
                              "before it is " + shown(at(1)) + ": name that one"));
  EXPECT_EQ(error_of(ErrorKind::kFormat, [&] { CheckpointFolder::open(folder.path()); }),
            refused());
  for (const std::size_t i : {0U, 1U, 2U}) fs::remove_all(at(i));
  EXPECT_THAT(refused(), Says("there is no whole checkpoint before it"));
}

TEST(CheckpointFolder, AModelsFolderIsNoneWithAnyContent) {
  const TemporaryFolder folder;
  folder.write("config.json", "{}");
  folder.write("model.safetensors", "");
  EXPECT_FALSE(CheckpointFolder::is_one(folder.path()));
  folder.write("latest", "global_step500");
  EXPECT_FALSE(CheckpointFolder::is_one(folder.path()));
  std::filesystem::create_directories(folder / "step-500");
  EXPECT_FALSE(CheckpointFolder::is_one(folder.path()));
  EXPECT_FALSE(CheckpointFolder::is_one(folder / "config.json"));
  EXPECT_FALSE(CheckpointFolder::is_one(folder / "absent"));
}

TEST(CheckpointStore, NamesOfStepsAreThoseThatItGives) {
  EXPECT_EQ(parse_step_folder("step-0"), 0);
  EXPECT_EQ(parse_step_folder(step_folder(12)), 12);
  for (const char* name : {"step-", "step-01", "step--1", "step-1.tmp", "step-1x", "Step-1", "1",
                           "step-99999999999999999999", "step-+1"}) {
    EXPECT_EQ(parse_step_folder(name), std::nullopt) << name;
  }
}

// Who writes under such a name there loses it to a save, or stops a resume.
TEST(CheckpointStore, KnowsWhereARunGivesTheNames) {
  for (const char* name : {"step-0", "step-12", "step-12.tmp", "step-x", "latest", "latest.1.tmp"})
    EXPECT_TRUE(CheckpointStore::takes(name)) << name;
  for (const char* name : {"step", "steps-1", "converted-step-1", "latest-export", ""})
    EXPECT_FALSE(CheckpointStore::takes(name)) << name;
  const TemporaryFolder folder;
  const auto of_a_run = [&](const char* name) {
    return CheckpointStore(folder / name).is_of_a_run();
  };
  EXPECT_FALSE(of_a_run("absent"));
  folder.write("latest/latest", "step-3");
  folder.write("whole/step-3/manifest.json", "{}");
  folder.write("locked/.lock", "");
  for (const char* name : {"latest", "whole", "locked"}) EXPECT_TRUE(of_a_run(name)) << name;
  folder.write("exports/step-3/config.json", "{}");
  fs::create_directory_symlink("step-3", folder / "exports/latest");
  folder.write("run/.lock", "");
  folder.write("run/config.toml", "");
  folder.write("metrics/.lock", "");
  folder.write("metrics/metrics.jsonl", "");
  for (const char* name : {"exports", "run", "metrics"}) EXPECT_FALSE(of_a_run(name)) << name;
}

TEST(CheckpointStore, OnlyFinishedFoldersCount) {
  const TemporaryFolder folder;
  const CheckpointStore store(folder / "checkpoint");
  EXPECT_THAT(store.steps(), ElementsAre());
  EXPECT_EQ(store.latest(), std::nullopt);
  store.clean();
  for (const std::int64_t step : {10, 9, 100}) {
    store.begin(step);
    folder.write("checkpoint/" + step_folder(step) + ".tmp/a", "new");
    if (step != 100) store.finish(step);
  }
  EXPECT_THAT(store.steps(), ElementsAre(9, 10));
  EXPECT_EQ(store.latest(), 10) << "the newest, where a crash came before `latest`";
  store.set_latest(9);
  EXPECT_EQ(store.latest(), 9);
  fs::create_hard_link(store.folder() / "latest", store.folder() / "same file");
  store.set_latest(9);
  EXPECT_TRUE(fs::equivalent(store.folder() / "latest", store.folder() / "same file"))
      << "what stands there already is not written again";
  store.set_latest(10);
  EXPECT_EQ(store.latest(), 10);
  store.set_latest(9);

  folder.write("checkpoint/latest.77.tmp", "step-100");
  folder.write("checkpoint/notes.tmp", "the user's own");
  store.clean();
  EXPECT_FALSE(fs::exists(store.temporary(100)));
  EXPECT_FALSE(fs::exists(folder / "checkpoint/latest.77.tmp"));
  EXPECT_TRUE(fs::exists(folder / "checkpoint/notes.tmp"));
  EXPECT_THAT(store.steps(), ElementsAre(9, 10));
}

// A step that is replaced stays whole until the new one has its name, however the attempt ends.
TEST(CheckpointStore, AStepThatIsReplacedIsThereUntilTheNewOneIs) {
  const TemporaryFolder folder;
  const CheckpointStore store(folder / "checkpoint");
  const auto begin = [&](const std::string& text) {
    store.clean();
    store.begin(5);
    folder.write("checkpoint/step-5.tmp/a", text);
  };
  begin("old");
  store.finish(5);
  begin("new");
  store.finish(5);
  EXPECT_EQ(read_text_file(store.complete(5) / "a", 16), "new");
  EXPECT_FALSE(fs::exists(folder / "checkpoint/step-5.replaced.tmp"));

  // A crash between the two renames.
  fs::rename(store.complete(5), folder / "checkpoint/step-5.replaced.tmp");
  begin("newer");
  EXPECT_EQ(read_text_file(store.complete(5) / "a", 16), "new");
  // One after both: what was replaced is a leftover.
  fs::create_directory(folder / "checkpoint/step-5.replaced.tmp");
  store.finish(5);
  EXPECT_EQ(read_text_file(store.complete(5) / "a", 16), "newer");
  fs::create_directory(folder / "checkpoint/step-5.replaced.tmp");
  store.clean();
  EXPECT_FALSE(fs::exists(folder / "checkpoint/step-5.replaced.tmp"));
  EXPECT_THAT(store.steps(), ElementsAre(5));

  // Nothing to finish: an error before anything has moved.
  error_of(ErrorKind::kIo, [&] { store.finish(5); });
  EXPECT_EQ(read_text_file(store.complete(5) / "a", 16), "newer");
}

TEST(CheckpointStore, AStepIsNotBegunThroughALink) {
  const TemporaryFolder folder;
  const CheckpointStore store(folder / "checkpoint");
  store.clean();
  fs::create_directory(folder / "elsewhere");
  fs::create_directory_symlink(folder / "elsewhere", store.temporary(3));
  EXPECT_REFUSED(kIo, store.begin(3), "found a link");
  store.clean();
  store.begin(3);
  store.begin(3);  // as another rank
  EXPECT_TRUE(fs::exists(folder / "elsewhere"));
}

TEST(CheckpointStore, AFinishedFolderReplacesOneOfItsName) {
  const TemporaryFolder folder;
  const CheckpointStore store(folder.path());
  folder.write("step-5/old", "");
  folder.write("step-5.tmp/new", "");
  store.finish(5);
  EXPECT_TRUE(fs::exists(folder / "step-5/new"));
  EXPECT_FALSE(fs::exists(folder / "step-5/old"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
}

TEST(CheckpointStore, KeepsTheNewestUpToTheStepAndLeavesLaterOnes) {
  const TemporaryFolder folder;
  const CheckpointStore store(folder.path());
  for (const std::int64_t step : {1, 2, 10, 20, 30}) store.begin(step), store.finish(step);
  store.keep(0, 20);
  EXPECT_THAT(store.steps(), ElementsAre(1, 2, 10, 20, 30));
  store.keep(2, 20);
  EXPECT_THAT(store.steps(), ElementsAre(10, 20, 30));
  store.keep(1, 20);
  EXPECT_THAT(store.steps(), ElementsAre(20, 30));
}

TEST(CheckpointStore, AnUnusableLatestSaysWhatToDo) {
  const TemporaryFolder folder;
  const CheckpointStore store(folder.path());
  folder.write("latest", "step-7\n");
  EXPECT_REFUSED(kFormat, store.latest(), "found step-7, which is not there", "or remove it");
  folder.write("latest", "../step-7");
  EXPECT_REFUSED(kFormat, store.latest(), "found '../step-7', expected step-N");
}

}  // namespace
}  // namespace tessera::checkpoint_folder_test
