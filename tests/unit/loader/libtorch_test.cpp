// Which libtorch the executable opens: drawn machines against a list of rules, and refusals.
#include "loader/libtorch.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <random>

#include "support/process.h"
#include "support/temporary_folder.h"
#include "support/test.h"

namespace tessera::loader {
namespace {
namespace fs = std::filesystem;

constexpr int kMachines = 100;

std::size_t count_of(const std::string& what, const std::string& text) {
  std::size_t count = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

struct Kind {
  std::string version;
  bool cuda = false;
};

constexpr const char* kHeader = "include/torch/headeronly/version.h";
constexpr const char* kHeaderTo29 = "include/torch/csrc/api/include/torch/version.h";

/// A folder as that of a libtorch looks from outside.
fs::path make_libtorch(const TemporaryFolder& machine, const std::string& name, const Kind& kind,
                       const std::string& place = kHeader) {
  std::string header = "#pragma once\n";
  std::size_t at = 0;
  for (const char* part : {"MAJOR", "MINOR", "PATCH"}) {
    const auto end = kind.version.find('.', at);
    header += concat("#define TORCH_VERSION_", part, " ", kind.version.substr(at, end - at), "\n");
    at = end + 1;
  }
  machine.write(concat(name, "/", place), header);
  machine.write(name + "/lib/libtorch_cpu.so", "");
  if (kind.cuda) machine.write(name + "/lib/libtorch_cuda.so", "");
  return machine / name;
}

/// Where a libtorch may be, in the order in which they are looked at.
const std::vector<std::string> kPlaces{"of the wheel",
                                       "build",
                                       "venv/lib/python3.11/site-packages/torch",
                                       "conda/lib/python3.9/site-packages/torch",
                                       "copy/torch",
                                       "copy/libtorch",
                                       "torch",
                                       "libtorch",
                                       "found by python"};
const std::vector<Kind> kKinds{{"2.13.0"},       {"2.13.1", true}, {"2.12.0"},
                               {"2.15.0", true}, {"1.13.0"},       {"2.1.3"}};

/// Property: of drawn machines the first libtorch in order that fits is taken, where there is one,
/// else the error names each that was found and no other. Naive: the first is taken, or a minor
/// version that begins alike ("2.1" and "2.13").
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
    if (draw(2) == 0) environment[kTorchOfWheel] = machine / "of the wheel";
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
          (!place.starts_with("of") || environment.contains(kTorchOfWheel)) &&
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
    EXPECT_EQ(count_of(" CUDA in ", said), found.size()) << said;
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

// Naive: it counts as none, and who has set TESSERA_TORCH reads that lib/ and include/ are missing.
TEST(FindLibtorch, ALibtorchWhoseVersionCannotBeReadIsRefusedByTheFile) {
  const TemporaryFolder machine;
  const fs::path folder = make_libtorch(machine, "torch", {"2.13.0"});
  EXPECT_TRUE(libtorch_in(folder).has_value());
  const auto named = [&] {
    return find_libtorch({.torch = "2.13"}, "copy/lib/tessera/tessera",
                         {{"TESSERA_TORCH", folder.string()}}, [] { return fs::path(); });
  };
  const auto refused = [&](ErrorKind kind, const std::string& file, const std::string& why) {
    EXPECT_THAT(error_of(kind, [&] { libtorch_in(folder); }), Says(file, why));
    EXPECT_THAT(error_of(kind, named), Says(concat("TESSERA_TORCH: found a libtorch in '",
                                                   folder.string(), "' that cannot be read ("),
                                            file, why, "expected 2.13, "));
  };
  for (const auto& [header, part] : std::vector<std::pair<std::string, std::string>>{
           {"", "MAJOR in its 0 bytes"},
           {"#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR x\n", "MINOR in its "},
           {"#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 13", "PATCH in its "}}) {
    machine.write(concat("torch/", kHeader), header);
    refused(ErrorKind::kFormat, kHeader, "found no TORCH_VERSION_" + part);
  }
  fs::remove(folder / kHeader);
  refused(ErrorKind::kIo, kHeader, "No such file");
  machine.write(concat("torch/", kHeaderTo29), "#include <torch/headeronly/version.h>\n");
  refused(ErrorKind::kFormat, kHeaderTo29, "found no TORCH_VERSION_MAJOR");
}

TEST(FindLibtorch, AFolderThatCannotBeLookedIntoIsNamedWithTheReason) {
  const TemporaryFolder machine;
  fs::create_symlink("torch", machine / "torch");
  EXPECT_REFUSED(kConfig,
                 find_libtorch({.torch = "2.13"}, "copy/lib/tessera/tessera",
                               {{"TESSERA_TORCH", machine / "torch"}}, [] { return fs::path(); }),
                 "TESSERA_TORCH: found no libtorch in ", "' (Too many levels of symbolic links), ");
}

TEST(FindLibtorch, TheFolderOfItsCMakeFilesNamesALibtorch) {
  const TemporaryFolder machine;
  const fs::path torch = make_libtorch(machine, "a torch", {"2.13.0"});
  fs::create_directories(torch / "share/cmake/Torch");
  for (const char* name :
       {"", "/", "/share/cmake", "/share/cmake/", "/share/cmake/Torch", "/share/cmake/Torch/"}) {
    const auto found =
        find_libtorch({.torch = "2.13"}, "copy/lib/tessera/tessera",
                      {{"TESSERA_TORCH", torch.string() + name}}, [] { return fs::path(); });
    EXPECT_TRUE(fs::equivalent(found.folder, torch)) << name;
  }
}

// Up to 2.9 it is in another header, and the first of the two is not there.
TEST(FindLibtorch, AnOlderLibtorchIsRefusedByItsVersion) {
  for (const char* version : {"2.9.1", "2.1.0", "1.13.1"}) {
    const TemporaryFolder machine;
    const fs::path torch = make_libtorch(machine, "torch", {version}, kHeaderTo29);
    for (const base::Environment& environment :
         {base::Environment{{"TESSERA_TORCH", torch.string()}}, base::Environment{}}) {
      EXPECT_REFUSED(kConfig,
                     find_libtorch({.torch = "2.13"}, machine / "copy/lib/tessera/tessera",
                                   environment, [] { return fs::path(); }),
                     concat("libtorch: found ", version, " without CUDA in "), "expected 2.13");
    }
  }
}

TEST(FindLibtorch, TheWheelsOwnIsNamedAsWhatItIs) {
  const TemporaryFolder machine;
  const fs::path torch = make_libtorch(machine, "site-packages/torch", {"2.12.0"});
  const std::string said = error_of(ErrorKind::kConfig, [&] {
    find_libtorch({.torch = "2.13"}, machine / "copy/lib/tessera/tessera",
                  {{kTorchOfWheel, torch.string()}}, [&] { return torch; });
  });
  EXPECT_THAT(said, Says(concat("found 2.12.0 without CUDA in '", torch.string(),
                                "', the torch of the Python that started it, expected")));
  EXPECT_EQ(said.find("TESSERA_TORCH names"), std::string::npos) << said;
}

/// Property: several places may lead to one folder, by links too; a refusal names it once.
TEST(FindLibtorch, AFolderOfSeveralPlacesIsNamedOnce) {
  const TemporaryFolder machine;
  const fs::path torch =
      make_libtorch(machine, "venv/lib/python3.11/site-packages/torch", {"2.12.0"});
  fs::create_symlink("python3.11", machine / "venv/lib/python3");
  fs::create_directory_symlink(machine / "venv", machine / "conda");
  fs::create_directory_symlink(torch, machine / "libtorch");
  const std::string said = error_of(ErrorKind::kConfig, [&] {
    find_libtorch({.torch = "2.13", .folder = torch.string()}, machine / "copy/lib/tessera/tessera",
                  {{"VIRTUAL_ENV", machine / "venv"}, {"CONDA_PREFIX", machine / "conda"}},
                  [&] { return torch; });
  });
  EXPECT_EQ(count_of(" CUDA in ", said), 1U) << said;
}

/// Property: each of the folders from above the copy down to lib, and each library, counts where
/// no other user can write to it; else the libtorch is passed over and the refusal says why. Named by
/// a variable it counts all the same. Naive: one folder is looked at, and one of its bits.
TEST(FindLibtorch, WhatOthersMayHavePutNextToTheCopyDoesNotCount) {
  for (const std::string name : {"torch", "copy/libtorch"}) {
    const TemporaryFolder machine;
    const fs::path torch = make_libtorch(machine, name, {"2.13.0"});
    machine.write(name + "/lib/libgomp.so.1", "");
    const auto find = [&](const base::Environment& environment = {}) {
      return find_libtorch({.torch = "2.13"}, machine / "copy/lib/tessera/tessera", environment,
                           [] { return fs::path(); });
    };
    EXPECT_EQ(find().folder, torch);
    const std::string passed_over =
        "libtorch: found 2.13.0 without CUDA in '" + torch.string() + "', passed over since ";
    for (fs::path path = torch / "lib/libgomp.so.1"; path != machine.path().parent_path();
         path = path.parent_path()) {
      const auto before = fs::status(path).permissions();
      fs::permissions(path, before | fs::perms::others_write);
      EXPECT_REFUSED(kConfig, find(),
                     concat(passed_over, "everybody may write to '", path.string(), "'"));
      EXPECT_EQ(find({{"TESSERA_TORCH", torch.string()}}).folder, torch);
      fs::permissions(path, before | fs::perms::group_write);
      EXPECT_EQ(find().folder, torch) << "the own group";
      if (::geteuid() == 0) {  // who else can give a file away?
        ASSERT_EQ(::chown(path.c_str(), 0, 12345), 0);
        EXPECT_REFUSED(kConfig, find(),
                       concat(passed_over, "the group 12345 may write to '", path.string(), "'"));
        fs::permissions(path, before);
        EXPECT_EQ(find().folder, torch) << "a group that only reads";
        ASSERT_EQ(::chown(path.c_str(), 12345, 0), 0);
        EXPECT_REFUSED(kConfig, find(),
                       concat(passed_over, "'", path.string(), "' belongs to the user 12345"));
        ASSERT_EQ(::chown(path.c_str(), 0, 0), 0);
      }
      fs::permissions(path, before);
    }
    EXPECT_EQ(find().folder, torch);
  }
}

// As /tmp is: anybody may put a folder next to the copy, and no other user one into it.
TEST(FindLibtorch, InAFolderForAllOnlyTheCopyItselfCounts) {
  const TemporaryFolder machine;
  fs::permissions(machine.path(), fs::perms::all | fs::perms::sticky_bit);
  const auto find = [&] {
    return find_libtorch({.torch = "2.13"}, machine / "copy/lib/tessera/tessera", {},
                         [] { return fs::path(); });
  };
  make_libtorch(machine, "torch", {"2.13.0"});
  EXPECT_REFUSED(kConfig, find(), "passed over since everybody may write to ");
  const fs::path within = make_libtorch(machine, "copy/torch", {"2.13.0"});
  EXPECT_EQ(find().folder, within);
}

TEST(FindLibtorch, OneThatCannotBeReadIsPassedOverAndNamed) {
  const TemporaryFolder machine;
  const fs::path broken = make_libtorch(machine, "copy/torch", {"2.13.0"});
  fs::remove(broken / "include/torch/headeronly/version.h");
  fs::create_directory(broken / "include/torch/headeronly/version.h");
  const auto find = [&] {
    return find_libtorch({.torch = "2.13"}, machine / "copy/lib/tessera/tessera", {},
                         [] { return fs::path(); });
  };
  EXPECT_REFUSED(kConfig, find(), "one that cannot be read", "version.h");
  const fs::path whole = make_libtorch(machine, "torch", {"2.13.0"});
  EXPECT_EQ(find().folder, whole);
}

TEST(FindLibtorch, LibrariesAreOpenedBeforeThoseThatNeedThem) {
  const TemporaryFolder machine;
  const auto names = [&](bool cuda) {
    std::vector<std::string> all;
    const Libtorch torch{.folder = machine / "t", .version = "2.13.0", .cuda = true};
    for (const fs::path& path : libraries_of(torch, {.torch = "2.13", .cuda = cuda})) {
      EXPECT_EQ(path.parent_path(), machine / "t/lib");
      all.push_back(path.filename());
    }
    return all;
  };
  EXPECT_THAT(names(false), ElementsAre("libc10.so", "libtorch_cpu.so", "libtorch.so"));
  machine.write("t/lib/libgomp.so.1", "");
  EXPECT_THAT(names(true), ElementsAre("libgomp.so.1", "libc10.so", "libc10_cuda.so",
                                       "libtorch_cpu.so", "libtorch_cuda.so", "libtorch.so"));
}

// As LD_PRELOAD does it: what is opened next takes it by its name.
TEST(OpenedLibtorch, OneThatIsLoadedFromElsewhereIsRefusedByItsPath) {
  const TemporaryFolder machine;
  const Libtorch torch = *libtorch_in(make_libtorch(machine, "torch", {"2.13.0"}));
  const fs::path own = torch.folder / "lib/libtorch_cpu.so";
  fs::create_symlink(own, machine / "libtorch_cpu.so");
  EXPECT_NO_THROW(
      require_none_loaded(torch, {"", "linux-vdso.so.1", "/lib/libm.so.6", "/other/libgomp.so.1",
                                  own, machine / "libtorch_cpu.so"}));
  for (const std::string name : {"libc10.so", "libtorch_cpu.so", "libtorch.so", "libc10_cuda.so"}) {
    EXPECT_REFUSED(kConfig, require_none_loaded(torch, {"/lib/libm.so.6", "/other/" + name}),
                   concat("libtorch: found '/other/", name, "' loaded before it, expected"),
                   torch.folder.string(), "LD_PRELOAD");
  }
}

TEST(OpenedLibtorch, OneThatIsNotWhatItsHeaderSaysIsRefused) {
  const Libtorch torch{.folder = "/x", .version = "2.13.1"};
  const auto abi = [](std::uint64_t minor) { return std::uint64_t{2} << 56U | minor << 48U; };
  EXPECT_NO_THROW(require_version(torch, abi(13)));
  EXPECT_REFUSED(kConfig, require_version(torch, abi(15)),
                 "libtorch: found 2.15 in '/x/lib/libtorch_cpu.so', expected 2.13.1, as ");
  EXPECT_REFUSED(kConfig, require_version(torch, 0), "found 0.0 in ");
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
  for (const char* torch : {"", "2", "2.", ".13", "2.13.0", "2.x", "v2.13", " 2.13"}) {
    EXPECT_REFUSED(kFormat,
                   read(concat(R"({"torch": ")", torch, R"(", "cuda": true, "folder": ""})")),
                   concat("torch: found \"", torch, "\", expected MAJOR.MINOR"));
  }
  fs::create_symlink("loop.json", folder / "loop.json");
  EXPECT_REFUSED(kIo, read_built_for(folder / "loop.json"), "loop.json");
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

fs::path asked(double seconds = 10.0) { return torch_of_python(base::environment(), seconds); }

const std::string kAnswers = "printf '\\ntessera: torch in /x y/torch\\n'\n";

TEST(TorchOfPython, IsItsAnswerWithAnyOtherOutput) {
  for (const std::string& script :
       {kAnswers, "echo hello; echo noise >&2\n" + kAnswers, kAnswers + "exit 1",
        kAnswers + "sleep 1000 & exit 0", kAnswers + "exec sleep 1000"}) {
    const Python python(script);
    EXPECT_EQ(asked(), "/x y/torch") << script;
  }
  for (const char* script : {"printf /x/torch", "exec false", "kill -9 $$", "exit 0",
                             "printf '\\ntessera: torch in \\n'"}) {
    const Python python(script);
    EXPECT_EQ(asked(), "") << script;
  }
}

TEST(TorchOfPython, IsAskedWhereEndsOfChildrenAreIgnored) {
  const auto before = ::signal(SIGCHLD, SIG_IGN);
  {
    const Python python(kAnswers);
    EXPECT_EQ(asked(), "/x y/torch");
  }
  ::signal(SIGCHLD, before);
}

TEST(TorchOfPython, IsNotWaitedForWithoutEnd) {
  const Python python("exec sleep 1000");
  EXPECT_REFUSED(kConfig, asked(0.2), "python3 does not say within 0.2 s", "set TESSERA_TORCH");
}

// Naive: where there is always something to read, the time is not looked at.
TEST(TorchOfPython, ThatPrintsWithoutEndIsNotReadWithoutEnd) {
  const Python python("exec yes");
  EXPECT_REFUSED(kConfig, asked(0.2), "python3 does not say within 0.2 s");
}

TEST(TorchOfPython, IsItsAnswerBehindAnyLengthOfNoise) {
  for (const int bytes : {100, 4095, 4096, 8191, 8192, 100000}) {
    const Python python(concat("head -c ", bytes, " /dev/zero\n", kAnswers));
    EXPECT_EQ(asked(), "/x y/torch") << bytes;
  }
}

constexpr std::chrono::seconds kPatience{60};

bool ends(pid_t process) {
  return wait_until(kPatience, [&] { return !alive(process); });
}

TEST(TorchOfPython, EndsWithAllThatItHasStarted) {
  for (const std::string& script : {std::string("sleep 1000"), std::string("yes >&2 &\nsleep 1000"),
                                    kAnswers + "sleep 1000", kAnswers + "exit 0"}) {
    const TemporaryFolder folder;
    const std::string said = (folder / "started").string();
    const Python python(concat("sleep 1000 >&2 &\necho $! >'", said, "'\n", script));
    // On a busy machine the script may not come far within the first limits.
    for (double limit = 0.25; !read_so_far(said).ends_with("\n"); limit *= 2) {
      ASSERT_LT(limit, 100);
      try {
        asked(limit);
      } catch (const Error&) {  // no answer
      }
    }
    const pid_t started = std::atoi(read_file(said).c_str());
    ASSERT_GT(started, 0);
    EXPECT_TRUE(ends(started)) << script;
  }
}

// A launcher that gives up kills the program, and not what that has started.
TEST(TorchOfPython, EndsWithTheProgramThatAskedIt) {
  const TemporaryFolder folder;
  const std::string said = (folder / "started").string();
  const Python python(concat("echo $$ >'", said, "'\nexec sleep 1000"));
  const pid_t program = ::fork();
  if (program == 0) {
    asked(1000);
    ::_exit(0);
  }
  EXPECT_TRUE(wait_until(kPatience, [&] { return read_so_far(said).ends_with("\n"); }));
  const pid_t started = std::atoi(read_file(said).c_str());
  ASSERT_GT(started, 0);
  ::kill(program, SIGKILL);
  ::waitpid(program, nullptr, 0);
  EXPECT_TRUE(ends(started));
}

TEST(TorchOfPython, AFileOfThatNameIsNoPackage) {
  const TemporaryFolder machine;
  machine.write("mine/torch.py", "raise SystemExit('imported')\n");
  machine.write("packages/torch/__init__.py", "raise SystemExit('imported')\n");
  auto variables = base::environment();
  variables["PYTHONPATH"] =
      concat((machine / "mine").string(), ":", (machine / "packages").string());
  EXPECT_EQ(torch_of_python(variables, 60.0), machine / "packages/torch");
  variables["PYTHONPATH"] = machine / "mine";
  EXPECT_NE(torch_of_python(variables, 60.0), machine / "mine");
}

TEST(TorchOfPython, ImportsNothingAndPassesOverTheFolderOfTheCommand) {
  // The real python3 finds the package that PYTHONPATH names, and does not run it.
  const TemporaryFolder machine;
  machine.write("packages/torch/__init__.py", "raise SystemExit('imported')\n");
  machine.write("here/torch/__init__.py", "raise SystemExit('of the folder')\n");
  const fs::path before = fs::current_path();
  fs::current_path(machine / "here");
  auto variables = base::environment();
  variables["PYTHONPATH"] = machine / "packages";
  for (const char* safe : {"", "1"}) {
    variables["PYTHONSAFEPATH"] = safe;
    EXPECT_EQ(torch_of_python(variables), machine / "packages/torch");
  }
  variables.erase("PYTHONPATH");
  variables.erase("PYTHONSAFEPATH");
  EXPECT_NE(torch_of_python(variables), machine / "here/torch");
  fs::current_path(before);
}

}  // namespace
}  // namespace tessera::loader
