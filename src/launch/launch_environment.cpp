#include "launch/launch_environment.h"

#include <charconv>
#include <vector>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Typed reading of the variables, with errors that name them.
class Variables {
 public:
  explicit Variables(const base::Environment& all) : all_(all) {}

  bool has(std::string_view name) const { return all_.find(name) != all_.end(); }

  std::string text(std::string_view name) const {
    const auto found = all_.find(name);
    return found == all_.end() ? std::string() : found->second;
  }

  std::optional<int> number(std::string_view name) const {
    if (!has(name)) return std::nullopt;
    const std::string value = text(name);
    int parsed = 0;
    const auto [end, failure] = std::from_chars(value.data(), value.data() + value.size(), parsed);
    TESSERA_CHECK(failure == std::errc() && end == value.data() + value.size() && !value.empty(),
                  ErrorKind::kUsage, "environment: found ", name, "=\"", value,
                  "\", expected a whole number");
    return parsed;
  }

  /// Reads a variable that must be set because `because` is.
  int required(std::string_view name, std::string_view because) const {
    const auto value = number(name);
    TESSERA_CHECK(value.has_value(), ErrorKind::kUsage, "environment: found ", because, " without ",
                  name, "; set both or neither");
    return *value;
  }

  std::string shown(std::string_view name) const {
    return has(name) ? concat(name, "=", text(name)) : concat(name, " not set");
  }

 private:
  const base::Environment& all_;
};

/// The names of one launcher for what every launcher tells.
struct Spelling {
  Launcher launcher;
  std::string_view rank;
  std::string_view size;
  std::vector<std::string_view> local_rank;
  std::vector<std::string_view> local_size;
  std::vector<std::string_view> hosts;  ///< number of hosts
  std::vector<std::string_view> job;    ///< same on all ranks, different for each job
};

const Spelling& spelling(Launcher launcher) {
  static const std::vector<Spelling> all = {
      {Launcher::kTorchrun,
       "RANK",
       "WORLD_SIZE",
       {"LOCAL_RANK"},
       {"LOCAL_WORLD_SIZE"},
       {},
       {"TORCHELASTIC_RUN_ID"}},
      {Launcher::kOpenMpi,
       "OMPI_COMM_WORLD_RANK",
       "OMPI_COMM_WORLD_SIZE",
       {"OMPI_COMM_WORLD_LOCAL_RANK"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE"},
       {},
       {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
      {Launcher::kPmi,
       "PMI_RANK",
       "PMI_SIZE",
       {"MPI_LOCALRANKID", "PMI_LOCAL_RANK"},
       {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"},
       {},
       {"PMI_JOBID", "HYDRA_JOBID"}},
      {Launcher::kSlurm,
       "SLURM_PROCID",
       "SLURM_STEP_NUM_TASKS",
       {"SLURM_LOCALID"},
       {},
       {"SLURM_STEP_NUM_NODES"},
       {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
  };
  for (const Spelling& one : all) {
    if (one.launcher == launcher) return one;
  }
  throw Error(ErrorKind::kInternal, "launcher without a spelling");
}

std::optional<int> first_number(const Variables& variables,
                                const std::vector<std::string_view>& names) {
  for (const auto name : names) {
    if (const auto value = variables.number(name)) return value;
  }
  return std::nullopt;
}

/// srun's own PMI names the same ranks as its step, and only the step tells where they are.
bool is_slurms_pmi(const Variables& variables) {
  return variables.text("PMI_RANK") == variables.text("SLURM_PROCID") &&
         variables.text("PMI_SIZE") == variables.text("SLURM_STEP_NUM_TASKS") &&
         !variables.has("MPI_LOCALRANKID");
}

Launcher recognise(const Variables& variables) {
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) return Launcher::kTorchrun;
  if (variables.has("OMPI_COMM_WORLD_RANK") || variables.has("OMPI_COMM_WORLD_SIZE")) {
    return Launcher::kOpenMpi;
  }
  const bool in_step =
      variables.has("SLURM_STEP_ID") && variables.number("SLURM_STEP_NUM_TASKS").value_or(1) > 1;
  if (variables.has("PMI_RANK") || variables.has("PMI_SIZE")) {
    return in_step && is_slurms_pmi(variables) ? Launcher::kSlurm : Launcher::kPmi;
  }
  if (in_step) return Launcher::kSlurm;
  if (variables.has(spawn_variable::kRank)) return Launcher::kOwnSpawn;
  return Launcher::kSingle;
}

void check_position(const LaunchEnvironment& launch, const Spelling& names,
                    const Variables& variables) {
  TESSERA_CHECK(launch.world_size >= 1, ErrorKind::kUsage, "environment: found ",
                variables.shown(names.size), ", expected at least 1");
  TESSERA_CHECK(launch.rank >= 0 && launch.rank < launch.world_size, ErrorKind::kUsage,
                "environment: found ", variables.shown(names.rank), " with ",
                variables.shown(names.size), ", expected a rank from 0 to ", launch.world_size - 1);
  TESSERA_CHECK(launch.local_rank >= 0 && launch.local_rank < launch.world_size, ErrorKind::kUsage,
                "environment: found local rank ", launch.local_rank, " (",
                variables.shown(names.local_rank.front()), ") with ", variables.shown(names.size),
                ", expected one from 0 to ", launch.world_size - 1);
}

Hosts count_hosts(const LaunchEnvironment& launch, const Spelling& names,
                  const Variables& variables) {
  if (const auto hosts = first_number(variables, names.hosts)) {
    return *hosts > 1 ? Hosts::kSeveral : Hosts::kOne;
  }
  const auto local_size = first_number(variables, names.local_size);
  if (!local_size) return launch.world_size == 1 ? Hosts::kOne : Hosts::kUnknown;
  TESSERA_CHECK(
      *local_size >= 1 && *local_size <= launch.world_size && launch.local_rank < *local_size,
      ErrorKind::kUsage, "environment: found ", variables.shown(names.local_size.front()), " with ",
      variables.shown(names.size), " and local rank ", launch.local_rank,
      ", expected local rank < local size <= size");
  return *local_size < launch.world_size ? Hosts::kSeveral : Hosts::kOne;
}

/// Returns a hash that is the same on all ranks of a job and different for concurrent jobs; none
/// where the launcher does not name its jobs.
std::optional<std::uint32_t> hash_of_job(const Spelling& names, const Variables& variables) {
  std::uint32_t hash = 2166136261U;
  bool known = false;
  for (const auto name : names.job) {
    for (const char c : variables.text(name)) {
      hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
      known = true;
    }
  }
  if (!known) return std::nullopt;
  return hash;
}

/// Returns a port on which all ranks of a job on one host agree without communication, below the
/// range of the kernel's ephemeral ports.
std::uint16_t port_of_job(const Spelling& names, const Variables& variables) {
  const auto hash = hash_of_job(names, variables);
  return hash ? static_cast<std::uint16_t>(10000U + *hash % 20000U) : std::uint16_t{29500};
}

std::string store_prefix(const Spelling& names, const Variables& variables) {
  std::string prefix = "tessera";
  if (const auto hash = hash_of_job(names, variables)) prefix += concat("/job_", *hash);
  if (const auto attempt = variables.number("TORCHELASTIC_RESTART_COUNT")) {
    prefix += concat("/attempt_", *attempt);
  }
  return prefix;
}

/// Chooses the host of the store if no address is given.
void find_host(LaunchEnvironment& launch, const Variables& variables) {
  if (launch.hosts == Hosts::kOne) {
    launch.master_addr = "127.0.0.1";
    return;
  }
  if (launch.launcher == Launcher::kSlurm) launch.node_list = variables.text("SLURM_STEP_NODELIST");
  TESSERA_CHECK(!launch.node_list.empty(), ErrorKind::kUsage,
                "environment: ", to_string(launch.launcher), " started ", launch.world_size,
                launch.hosts == Hosts::kSeveral ? " ranks on several hosts and says no address"
                                                : " ranks and says neither where nor an address",
                "; set MASTER_ADDR or comm.master_addr",
                launch.hosts == Hosts::kSeveral ? "" : " (127.0.0.1 if all are on this host)");
}

void find_store(LaunchEnvironment& launch, const Spelling& names, const Variables& variables,
                const StoreAddress& fallback) {
  std::string addr = variables.text("MASTER_ADDR");
  if (addr.empty()) addr = fallback.host;
  const int port = variables.number("MASTER_PORT").value_or(fallback.port);
  TESSERA_CHECK(port >= 0 && port <= 65535, ErrorKind::kUsage, "environment: found port ", port,
                " (", variables.shown("MASTER_PORT"), "), expected 1 to 65535");
  if (addr.empty()) find_host(launch, variables);
  if (!addr.empty()) launch.master_addr = addr;
  launch.master_port = port != 0 ? static_cast<std::uint16_t>(port) : port_of_job(names, variables);
  launch.agent_store = launch.launcher == Launcher::kTorchrun &&
                       (variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True" ||
                        variables.text("TORCHELASTIC_USE_AGENT_STORE") == "1");
  TESSERA_CHECK(!launch.agent_store || (!addr.empty() && port != 0), ErrorKind::kUsage,
                "environment: found TORCHELASTIC_USE_AGENT_STORE with ",
                variables.shown("MASTER_ADDR"), " and ", variables.shown("MASTER_PORT"),
                ", expected the agent's address");
}

bool is_any_address(std::string_view host) { return host == "0.0.0.0" || host == "::"; }

LaunchEnvironment from_own_spawn(const Variables& variables) {
  LaunchEnvironment launch;
  launch.launcher = Launcher::kOwnSpawn;
  launch.rank = variables.required(spawn_variable::kRank, spawn_variable::kRank);
  launch.world_size = variables.required(spawn_variable::kSize, spawn_variable::kRank);
  launch.local_rank = launch.rank;
  launch.master_addr = "127.0.0.1";
  const int port = variables.required(spawn_variable::kPort, spawn_variable::kRank);
  TESSERA_CHECK(launch.rank >= 0 && launch.rank < launch.world_size && port > 0 && port <= 65535,
                ErrorKind::kUsage, "environment: found ", variables.shown(spawn_variable::kRank),
                ", ", variables.shown(spawn_variable::kSize), ", ",
                variables.shown(spawn_variable::kPort), "; these are for Tessera's own use");
  launch.master_port = static_cast<std::uint16_t>(port);
  launch.listen_fd = variables.number(spawn_variable::kListenFd).value_or(-1);
  launch.error_fd = variables.number(spawn_variable::kErrorFd).value_or(-1);
  launch.store_prefix = "tessera";
  return launch;
}

}  // namespace

std::string_view to_string(Launcher launcher) {
  switch (launcher) {
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kOpenMpi:
      return "Open MPI";
    case Launcher::kPmi:
      return "PMI";
    case Launcher::kSlurm:
      return "Slurm";
    case Launcher::kOwnSpawn:
      return "own spawn";
    case Launcher::kSingle:
      return "none";
  }
  return "unknown";
}

std::string to_string(const LaunchEnvironment& launch) {
  if (launch.launcher == Launcher::kSingle) return "a single process";
  std::string text =
      concat("rank ", launch.rank, " of ", launch.world_size, " by ", to_string(launch.launcher));
  if (launch.world_size > 1) {
    const std::string host = launch.master_addr.empty()
                                 ? concat("the first host of ", launch.node_list)
                                 : launch.master_addr;
    text += concat(", store at ", host, ":", launch.master_port);
  }
  return text;
}

bool is_loopback(std::string_view host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

Reach reach(const LaunchEnvironment& launch) {
  return launch.hosts == Hosts::kOne || is_loopback(launch.master_addr) ? Reach::kThisHost
                                                                        : Reach::kNetwork;
}

void require_network_address(const LaunchEnvironment& launch, const std::string& address) {
  // A user who gives rank 0 all addresses expects ranks from outside.
  const bool outside = launch.hosts == Hosts::kSeveral ||
                       (launch.hosts == Hosts::kUnknown && is_any_address(launch.master_addr));
  TESSERA_CHECK(!outside || is_loopback(launch.master_addr) || !is_loopback(address),
                ErrorKind::kComm, "store: found that ", launch.master_addr, " leads to ", address,
                " on the host of rank ", launch.rank,
                ", expected an address that other hosts reach; set MASTER_ADDR or comm.master_addr "
                "to one, or GLOO_SOCKET_IFNAME to a network interface");
}

LaunchEnvironment read_launch_environment(const base::Environment& all,
                                          const StoreAddress& fallback) {
  const Variables variables(all);
  const Launcher launcher = recognise(variables);
  if (launcher == Launcher::kSingle) return {};
  if (launcher == Launcher::kOwnSpawn) return from_own_spawn(variables);

  const Spelling& names = spelling(launcher);
  LaunchEnvironment launch;
  launch.launcher = launcher;
  launch.rank = variables.required(names.rank, names.size);
  launch.world_size = variables.required(names.size, names.rank);
  // A user who sets RANK and WORLD_SIZE by hand usually stays on one host.
  launch.local_rank = first_number(variables, names.local_rank).value_or(launch.rank);
  check_position(launch, names, variables);
  launch.hosts = count_hosts(launch, names, variables);
  if (launch.world_size > 1) find_store(launch, names, variables, fallback);
  launch.store_prefix = store_prefix(names, variables);
  return launch;
}

}  // namespace tessera::comm
