// LaunchEnvironment: which rank this process is, by the launcher's environment variables.
//
// A pure function from variables to a value, tried in the order torchrun > Open MPI > PMI > Slurm
// (only inside a step of several tasks) > own spawn > a single process. Variables that contradict
// each other are errors that name them; nothing is guessed. Next: spawn.h sets the variables of own
// spawn, comm/run_place.h keeps the result.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/environment.h"

namespace tessera::comm {

enum class Launcher : std::uint8_t { kTorchrun, kOpenMpi, kPmi, kSlurm, kOwnSpawn, kSingle };
/// "torchrun", "Open MPI", "PMI", "Slurm", "own spawn", "none".
std::string_view to_string(Launcher launcher);

/// Where the ranks are, as far as the launcher tells.
enum class Hosts : std::uint8_t { kOne, kSeveral, kUnknown };

struct LaunchEnvironment {
  Launcher launcher = Launcher::kSingle;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  Hosts hosts = Hosts::kOne;
  std::string master_addr;        ///< of the store; "" where `node_list` has to be expanded
  std::string node_list;          ///< Slurm's, "node[01-03,7]": the store is on its first host
  std::uint16_t master_port = 0;  ///< never 0 where there are several ranks
  /// Whether torchrun's agent holds the store: rank 0 then connects as a client too.
  bool agent_store = false;
  /// The prefix of every key: attempts of one torchrun job share a store, and a rank that by
  /// mistake has reached another job's store must not end that job.
  std::string store_prefix;
  int listen_fd = -1;  ///< own spawn: rank 0's inherited listening socket
  int error_fd = -1;   ///< own spawn: the pipe on which a rank tells its parent why it failed
  bool operator==(const LaunchEnvironment&) const = default;
};

/// "rank 1 of 4 by torchrun, store at 10.0.0.1:29500".
std::string to_string(const LaunchEnvironment& launch);

/// "127.0.0.1" and the rest of 127/8, "::1", "localhost".
bool is_loopback(std::string_view host);

/// From where the ranks' sockets must be reachable. Nothing listens beyond loopback unless an
/// address was given (by the user or by Slurm) that needs it.
enum class Reach : std::uint8_t { kThisHost, kNetwork };
Reach reach(const LaunchEnvironment& launch);

/// Errors: kComm where ranks of several hosts would have to reach `address`, a loopback address,
/// though the given address is none. Where ranks are perhaps on other hosts, that counts only if
/// the given address is 0.0.0.0, all addresses of rank 0.
void require_network_address(const LaunchEnvironment& launch, const std::string& address);

/// The address that a user gives for launchers that set no MASTER_ADDR and MASTER_PORT.
struct StoreAddress {
  std::string host;
  int port = 0;
};

/// Errors: kUsage for missing, malformed or contradictory variables (named with their values), and
/// where no address is given and the ranks are not known to be on one host. Slurm's node list
/// counts as an address: hosts.h resolves it.
LaunchEnvironment read_launch_environment(const base::Environment& variables,
                                          const StoreAddress& fallback = {});

/// The variables by which own spawn tells a child which rank it is.
namespace spawn_variable {
inline constexpr const char* kRank = "TESSERA_SPAWN_RANK";
inline constexpr const char* kSize = "TESSERA_SPAWN_SIZE";
inline constexpr const char* kPort = "TESSERA_SPAWN_PORT";
inline constexpr const char* kListenFd = "TESSERA_SPAWN_LISTEN_FD";
inline constexpr const char* kErrorFd = "TESSERA_SPAWN_ERROR_FD";
}  // namespace spawn_variable

}  // namespace tessera::comm
