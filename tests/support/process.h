// Programs that run while a test watches: started in a folder, watched, and ended with all that
// they started.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

using Words = std::vector<std::string>;
using Variables = std::map<std::string, std::string, std::less<>>;

/// One command; its output goes to stdout.txt and stderr.txt of its folder. The variables by which
/// launchers name ranks are cleared, and a rank gets one thread: tests share the machine.
class Process {
 public:
  Process(std::filesystem::path folder, const Words& words, const Variables& set = {});
  /// Ends it and all its descendants.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  /// Exit code (128 + signal), or none if it is still there after `limit`.
  std::optional<int> wait(std::chrono::milliseconds limit);
  std::string out() const;
  std::string err() const;
  std::string last_error_line() const;

  /// The processes of the ranks that it has started, by rank, once there are `count`. Fewer if it
  /// has ended, or that takes longer than two minutes.
  std::map<int, pid_t> wait_for_ranks(std::size_t count) const;

 private:
  const std::filesystem::path folder_;
  pid_t pid_ = -1;
  std::optional<int> code_;
};

/// Whether a process is there and has not ended (as a zombie has).
bool alive(pid_t pid);

/// Reads /proc/PID/NAME; "" where the process has ended.
std::string proc_file(pid_t pid, const std::string& name);

/// Looks every few milliseconds; false if `condition` does not come true in time.
template <class Condition>
bool wait_until(std::chrono::steady_clock::time_point deadline, Condition condition);
template <class Condition>
bool wait_until(std::chrono::milliseconds limit, Condition condition) {
  return wait_until(std::chrono::steady_clock::now() + limit, condition);
}

/// The lines of `text` in which `part` stands.
std::vector<std::string> lines_with(const std::string& text, const std::string& part);

/// Who starts the ranks. kPmi and kSlurm are a few lines of bash that set what those launchers set
/// and, as srun does, leave the other ranks alone when one fails; kHydra is MPICH's mpiexec.
enum class Starter { kOwnSpawn, kTorchrun, kStaticTorchrun, kOpenMpi, kHydra, kPmi, kSlurm };
std::string name_of(Starter starter);
/// Why it cannot be tried here, "" if it can.
std::string why_not(Starter starter);
/// The command that runs the program as `ranks` ranks.
Words started_by(Starter starter, int ranks, const Words& words);

// ---------------------------------------------------------------------------------------------

void pause_a_little();

template <class Condition>
bool wait_until(std::chrono::steady_clock::time_point deadline, Condition condition) {
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    pause_a_little();
  }
  return true;
}

}  // namespace tessera
