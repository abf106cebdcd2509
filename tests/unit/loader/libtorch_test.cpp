// Which libtorch the executable opens: drawn machines beside a list of rules, and each refusal.
#include "loader/libtorch.h"

#include <cstdlib>
#include <optional>
#include <random>

#include "support/temporary_folder.h"
#include "support/test.h"

namespace tessera::loader {
namespace {
namespace fs = std::filesystem;

constexpr int kMachines = 100;

struct Kind {
  std::string version;
  bool cuda = false;
};

/// A folder as that of a libtorch looks from outside.
fs::path make_libtorch(const TemporaryFolder& machine, const std::string& name, const Kind& kind) {
  std::string header = "#pragma once\n";
  std::size_t at = 0;
  for (const char* part : {"MAJOR", "MINOR", "PATCH"}) {
    const auto end = kind.version.find('.', at);
    header += concat("#define TORCH_VERSION_", part, " ", kind.version.substr(at, end - at), "\n");
    at = end + 1;
  }
  machine.write(name + "/include/torch/headeronly/version.h", header);
  machine.write(name + "/lib/libtorch_cpu.so", "");
  if (kind.cuda) machine.write(name + "/lib/libtorch_cuda.so", "");
  return machine / name;
}

/// Where a libtorch may be, in the order in which they are looked at.
const std::vector<std::string> kPlaces{"build",
                                       "copy/torch",
                                       "copy/libtorch",
                                       "torch",
                                       "libtorch",
                                       "venv/lib/python3.11/site-packages/torch",
                                       "conda/lib/python3.9/site-packages/torch",
                                       "found by python"};
const std::vector<Kind> kKinds{{"2.13.0"},       {"2.13.1", true}, {"2.12.0"},
                               {"2.15.0", true}, {"1.13.0"},       {"2.1.3"}};

/// Property: of drawn machines the first libtorch in order that fits is taken, where there is one,
/// else the error names each that was found and no other. Naive: the first is taken, or a minor
/// version that begins alike ("2.1" beside "2.13").
TEST(FindLibtorch, TakesTheFirstInOrderThatFits) {
  std::mt19937 random(20261129);
  const auto draw = [&](std::size_t count) { return random() % count; };
  int refused = 0;
  for (int number = 0; number < kMachines; ++number) {
    const TemporaryFolder machine;
    const BuiltFor built{.torch = "2.13",
                         .cuda = draw(3) == 0,
                         .folder = draw(2) == 0 ? (machine / "build").string() : ""};
    base::Environment environment{{"TESSERA_TORCH", ""}};
    if (draw(2) == 0) environment["VIRTUAL_ENV"] = machine / "venv";
    if (draw(2) == 0) environment["CONDA_PREFIX"] = machine / "conda";
    std::optional<fs::path> expected;
    std::vector<std::string> found;
    const bool asks_python = draw(2) == 0;
    for (const std::string& place : kPlaces) {
      if (draw(3) != 0) continue;
      const Kind& kind = kKinds[draw(kKinds.size())];
      const fs::path folder = make_libtorch(machine, place, kind);
      const bool looked_at =
          (place != "build" || !built.folder.empty()) &&
          (!place.starts_with("venv") || environment.contains("VIRTUAL_ENV")) &&
          (!place.starts_with("conda") || environment.contains("CONDA_PREFIX")) &&
          (!place.starts_with("found") || asks_python);
      if (!looked_at) continue;
      found.push_back(
          concat(kind.version, kind.cuda ? " with" : " without", " CUDA in '", folder.string()));
      if (!expected && kind.version.starts_with("2.13.") && (kind.cuda || !built.cuda))
        expected = folder;
    }
    const auto find = [&] {
      return find_libtorch(built, machine / "copy/lib/tessera/tessera", environment,
                           [&] { return asks_python ? machine / "found by python" : fs::path(); });
    };
    if (expected) {
      const Libtorch torch = find();
      EXPECT_EQ(torch.folder, *expected);
      EXPECT_EQ(torch, libtorch_in(*expected));
      continue;
    }
    ++refused;
    const std::string said = error_of(ErrorKind::kConfig, find);
    EXPECT_THAT(said, Says(built.cuda ? "expected 2.13 with CUDA, " : "expected 2.13, ",
                           "TESSERA_TORCH", "pip install 'torch==2.13.*'"));
    if (found.empty()) {
      EXPECT_THAT(said, Says("libtorch: found none"));
    }
    for (const std::string& one : found) EXPECT_THAT(said, Says(one));
  }
  EXPECT_GT(refused, kMachines / 10);
  EXPECT_LT(refused, kMachines * 9 / 10);
}

TEST(FindLibtorch, ASetVariableIsTheOnlyPlaceThatCounts) {
  const TemporaryFolder machine;
  const BuiltFor built{
      .torch = "2.13", .cuda = true, .folder = make_libtorch(machine, "build", {"2.13.0", true})};
  const auto with = [&](const fs::path& folder) {
    return find_libtorch(built, machine / "copy/lib/tessera/tessera",
                         {{"TESSERA_TORCH", folder.string()}},
                         []() -> fs::path { throw std::logic_error("python was asked"); });
  };
  const fs::path other = make_libtorch(machine, "other", {"2.13.2", true});
  EXPECT_EQ(with(other).folder, other);
  EXPECT_REFUSED(kConfig, with(make_libtorch(machine, "newer", {"2.14.1", true})),
                 "libtorch: found 2.14.1 with CUDA in ", "which TESSERA_TORCH names",
                 "expected 2.13 with CUDA");
  EXPECT_REFUSED(kConfig, with(make_libtorch(machine, "for_cpus", {"2.13.0"})),
                 "libtorch: found 2.13.0 without CUDA in ");
  EXPECT_REFUSED(kConfig, with(machine / "nowhere"), "TESSERA_TORCH: found no libtorch in ");
}

TEST(FindLibtorch, ALibtorchWithoutItsVersionIsNone) {
  const TemporaryFolder machine;
  const fs::path folder = make_libtorch(machine, "torch", {"2.13.0"});
  EXPECT_TRUE(libtorch_in(folder).has_value());
  for (const char* header : {"", "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR x\n",
                             "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 13"}) {
    machine.write("torch/include/torch/headeronly/version.h", header);
    EXPECT_EQ(libtorch_in(folder), std::nullopt) << header;
  }
  fs::remove(folder / "include/torch/headeronly/version.h");
  EXPECT_EQ(libtorch_in(folder), std::nullopt);
}

TEST(FindLibtorch, LibrariesForCudaAreOpenedWhereTheProgramHasIt) {
  const Libtorch torch{.folder = "/t", .version = "2.13.0", .cuda = true};
  EXPECT_THAT(
      libraries_of(torch, {.torch = "2.13", .cuda = true}),
      ElementsAre("/t/lib/libtorch_cpu.so", "/t/lib/libtorch_cuda.so", "/t/lib/libtorch.so"));
  EXPECT_THAT(libraries_of(torch, {.torch = "2.13"}),
              ElementsAre("/t/lib/libtorch_cpu.so", "/t/lib/libtorch.so"));
}

TEST(BuiltForFile, IsReadWholeOrRefused) {
  const TemporaryFolder folder;
  const auto read = [&](const std::string& text) {
    return read_built_for(folder.write("built_for.json", text));
  };
  const BuiltFor built = read(R"({"torch": "2.13", "cuda": true, "folder": "/a \"b\""})");
  EXPECT_EQ(built, (BuiltFor{.torch = "2.13", .cuda = true, .folder = "/a \"b\""}));
  for (const char* text :
       {"", "[]", "{}", R"({"torch": 2.13, "cuda": true, "folder": ""})",
        R"({"torch": "2.13", "cuda": "yes", "folder": ""})", R"({"torch": "2.13", "cuda": true})",
        R"({"torch": "2.13", "cuda": true, "folder": "", "more": 1})", R"({"torch": "2.13)"}) {
    EXPECT_REFUSED(kFormat, read(text), "built_for.json");
  }
  EXPECT_REFUSED(kIo, read_built_for(folder / "none.json"), "none.json");
}

/// A python3 as this machine may have it, as a script.
class Python {
 public:
  explicit Python(const std::string& script) {
    folder_.write("python3", "#!/bin/sh\n" + script);
    fs::permissions(folder_ / "python3", fs::perms::owner_all);
    ::setenv("PATH", concat(folder_.path().string(), ":", before_).c_str(), 1);
  }
  ~Python() { ::setenv("PATH", before_.c_str(), 1); }
  Python(const Python&) = delete;
  Python& operator=(const Python&) = delete;

 private:
  std::string before_ = std::getenv("PATH");
  TemporaryFolder folder_;
};

TEST(TorchOfPython, IsWhatItPrintsWhereItSucceeds) {
  {
    const Python python("printf '/x y/torch'; echo noise >&2");
    EXPECT_EQ(torch_of_python(), "/x y/torch");
  }
  for (const char* script : {"printf /x/torch; exit 1", "exec false", "kill -9 $$", "exit 0"}) {
    const Python python(script);
    EXPECT_EQ(torch_of_python(), "") << script;
  }
}

TEST(TorchOfPython, ImportsNothingAndPassesOverTheFolderOfTheCommand) {
  // The real python3 finds the package that PYTHONPATH names, and does not run it.
  const TemporaryFolder machine;
  machine.write("packages/torch/__init__.py", "raise SystemExit('imported')\n");
  machine.write("here/torch/__init__.py", "raise SystemExit('of the folder')\n");
  const fs::path before = fs::current_path();
  fs::current_path(machine / "here");
  ::setenv("PYTHONPATH", (machine / "packages").c_str(), 1);
  EXPECT_EQ(torch_of_python(), machine / "packages/torch");
  ::unsetenv("PYTHONPATH");
  EXPECT_NE(torch_of_python(), machine / "here/torch");
  fs::current_path(before);
}

}  // namespace
}  // namespace tessera::loader
