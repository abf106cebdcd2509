#include "support/process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "base/environment.h"
#include "support/free_port.h"
#include "support/temporary_folder.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::vector<pid_t> descendants(pid_t pid) {
  std::vector<pid_t> all;
  std::istringstream text(proc_file(pid, "task/" + std::to_string(pid) + "/children"));
  for (pid_t child = 0; text >> child;) {
    all.push_back(child);
    for (const pid_t further : descendants(child)) all.push_back(further);
  }
  return all;
}

/// Which rank a process is; none for the launcher itself, and between fork and exec.
std::optional<int> rank_of(pid_t pid) {
  std::istringstream words(proc_file(pid, "cmdline"));
  std::string program;
  std::getline(words, program, '\0');
  if (program != TESSERA_PROGRAM) return std::nullopt;
  std::istringstream variables(proc_file(pid, "environ"));
  for (std::string line; std::getline(variables, line, '\0');) {
    for (const std::string name :
         {"RANK=", "OMPI_COMM_WORLD_RANK=", "TESSERA_SPAWN_RANK=", "PMI_RANK=", "SLURM_PROCID="}) {
      if (line.starts_with(name)) return std::atoi(line.c_str() + name.size());
    }
  }
  return std::nullopt;
}

/// An array of pointers as posix_spawn wants it, over strings that outlive it.
std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> all;
  for (std::string& one : strings) all.push_back(one.data());
  all.push_back(nullptr);
  return all;
}

std::vector<std::string> environment_with(const Variables& set) {
  base::Environment variables = base::environment();
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    variables.erase(name);
  }
  variables["OMP_NUM_THREADS"] = "1";
  for (const auto& [name, value] : set) variables[name] = value;
  std::vector<std::string> lines;
  for (const auto& [name, value] : variables) lines.push_back(name + "=" + value);
  return lines;
}

/// Returns what a command prints, "" where it cannot be run.
std::string output_of(const std::string& command) {
  FILE* const pipe = ::popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return {};
  std::string text;
  std::array<char, 256> buffer{};
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) text += buffer.data();
  return ::pclose(pipe) == 0 ? text : "";
}

/// Starts torchrun, with "--" because it would take --nproc for itself.
Words torchrun(const Words& how, const std::string& count) {
  Words all{TESSERA_PYTHON, "-m", "torch.distributed.run"};
  all.insert(all.end(), how.begin(), how.end());
  all.insert(all.end(), {"--nproc-per-node", count, "--no-python", "--"});
  return all;
}

/// `count` processes that each get the variables which `exports` sets from $rank and $size; the
/// code of the last that failed. $$ is the same for all and no other job's.
Words bash_with(const std::string& exports, const std::string& count) {
  return {"bash", "-c",
          "size=$1; shift; for ((rank = 0; rank < size; ++rank)); do export " + exports +
              "; \"$@\" & done; code=0; "
              "for job in $(jobs -p); do wait \"$job\" || code=$?; done; exit $code",
          "launcher", count};
}

/// Returns the words that stand in front of the program.
Words launcher(Starter starter, const std::string& count) {
  switch (starter) {
    case Starter::kOwnSpawn:
      return {};
    case Starter::kTorchrun:  // of its own, at a free port
      return torchrun({"--standalone"}, count);
    case Starter::kStaticTorchrun:
      return torchrun({"--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1",
                       "--master-port", std::to_string(free_port())},
                      count);
    case Starter::kOpenMpi:
      return {"mpirun", "--allow-run-as-root", "--oversubscribe", "-np", count};
    case Starter::kHydra:
      return {"mpiexec.hydra", "-n", count};
    case Starter::kPmi:
      return bash_with(
          "PMI_RANK=$rank PMI_SIZE=$size MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=$size PMI_JOBID=$$",
          count);
    case Starter::kSlurm:
      return bash_with(
          "SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_STEP_NUM_TASKS=$size SLURM_STEP_ID=0 "
          "SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=here SLURM_JOB_ID=$$",
          count);
  }
  return {};
}

/// "" where it can start ranks here.
std::string find_out_why_not(Starter starter) {
  if (starter == Starter::kOpenMpi &&
      output_of("mpirun --version").find("Open MPI") == std::string::npos) {
    return "mpirun of Open MPI is not installed (Debian: openmpi-bin)";
  }
  if (starter == Starter::kHydra && output_of("mpiexec.hydra --version").empty()) {
    return "mpiexec.hydra of MPICH is not installed (Debian: mpich)";
  }
  if ((starter == Starter::kTorchrun || starter == Starter::kStaticTorchrun) &&
      output_of(TESSERA_PYTHON " -c 'import torch.distributed.run; print(1)'") != "1\n") {
    return "no torchrun: " TESSERA_PYTHON " has no torch";
  }
  return "";
}

}  // namespace

Process::Process(std::filesystem::path folder, const Words& words, const Variables& set)
    : folder_(std::move(folder)) {
  constexpr int kFlags = O_CREAT | O_WRONLY | O_TRUNC;
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addchdir_np(&actions, folder_.c_str());
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "stdout.txt", kFlags, 0600);
  ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "stderr.txt", kFlags, 0600);
  std::vector<std::string> arguments = words;
  std::vector<std::string> variables = environment_with(set);
  if (::posix_spawnp(&pid_, arguments[0].c_str(), &actions, nullptr, pointers(arguments).data(),
                     pointers(variables).data()) != 0) {
    std::abort();
  }
  ::posix_spawn_file_actions_destroy(&actions);
}

Process::~Process() {
  if (code_) return;
  std::vector<pid_t> all = descendants(pid_);
  ::kill(pid_, SIGTERM);  // launchers end their ranks then
  if (!wait(seconds(5))) all.push_back(pid_);
  for (const pid_t one : all) ::kill(one, SIGKILL);
  wait(seconds(5));
}

std::optional<int> Process::wait(milliseconds limit) {
  wait_until(limit, [&] {
    int status = 0;
    if (!code_ && ::waitpid(pid_, &status, WNOHANG) == pid_) {
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    return code_.has_value();
  });
  return code_;
}

std::string Process::out() const { return read_so_far(folder_ / "stdout.txt"); }
std::string Process::err() const { return read_so_far(folder_ / "stderr.txt"); }

std::string Process::last_error_line() const {
  std::istringstream text(err());
  std::string last;
  for (std::string line; std::getline(text, line);) {
    if (!line.empty()) last = line;
  }
  return last;
}

std::map<int, pid_t> Process::wait_for_ranks(std::size_t count) const {
  std::map<int, pid_t> ranks;
  wait_until(seconds(120), [&] {
    ranks.clear();
    for (const pid_t pid : descendants(pid_)) {
      if (const auto rank = rank_of(pid)) ranks[*rank] = pid;
    }
    return ranks.size() >= count || !alive(pid_);
  });
  return ranks;
}

std::string proc_file(pid_t pid, const std::string& name) {
  return read_so_far("/proc/" + std::to_string(pid) + "/" + name);
}

bool alive(pid_t pid) {
  const std::string stat = proc_file(pid, "stat");  // "PID (name) STATE ..."
  const auto name_end = stat.rfind(')');
  return name_end != std::string::npos && stat.at(name_end + 2) != 'Z';
}

std::vector<std::string> lines_with(const std::string& text, const std::string& part) {
  std::vector<std::string> lines;
  std::istringstream all(text);
  for (std::string line; std::getline(all, line);) {
    if (line.find(part) != std::string::npos) lines.push_back(line);
  }
  return lines;
}

std::string name_of(Starter starter) {
  switch (starter) {
    case Starter::kOwnSpawn:
      return "OwnSpawn";
    case Starter::kTorchrun:
      return "Torchrun";
    case Starter::kStaticTorchrun:
      return "StaticTorchrun";
    case Starter::kOpenMpi:
      return "OpenMpi";
    case Starter::kHydra:
      return "Hydra";
    case Starter::kPmi:
      return "Pmi";
    case Starter::kSlurm:
      return "Slurm";
  }
  return "";
}

std::string why_not(Starter starter) {
  // Asking torchrun takes seconds, and every test asks.
  static std::map<Starter, std::string> known;
  const auto [entry, is_new] = known.try_emplace(starter);
  if (is_new) entry->second = find_out_why_not(starter);
  return entry->second;
}

Words started_by(Starter starter, int ranks, const Words& words) {
  Words all = launcher(starter, std::to_string(ranks));
  all.emplace_back(TESSERA_PROGRAM);
  all.insert(all.end(), words.begin(), words.end());
  if (starter == Starter::kOwnSpawn) all.insert(all.end(), {"--nproc", std::to_string(ranks)});
  // It does not name its jobs: they would all take one port.
  if (starter == Starter::kHydra)
    all.insert(all.end(), {"--comm.master_port", std::to_string(free_port())});
  return all;
}

void pause_a_little() { std::this_thread::sleep_for(milliseconds(5)); }

}  // namespace tessera
