#include "train/measure_machine.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "base/text/printable.h"
#include "base/threads/product.h"
#include "capture/plan_profile.h"
#include "comm/device.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "comm/stream.h"
#include "launch/hosts.h"
#include "layout/bucket_plan.h"
#include "tessera/error.h"
#include "train/batch_memory.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

/// Seconds of one call in the middle: of calls for so long, of which there are some.
constexpr double kSecondsEach = 0.6;
constexpr std::size_t kFewest = 3;
constexpr std::size_t kMostRounds = 400;

void wait_for(at::Device device) {
  comm::Event end;
  end.record(comm::Stream::current(device), comm::EventSite::kHostRead);
  comm::wait_on_host(end, "a measurement");
}

double seconds_of(at::Device device, const std::function<void()>& call) {
  const auto begin = Clock::now();
  call();
  wait_for(device);
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double middle(std::vector<double> all) {
  std::ranges::sort(all);
  return all[all.size() / 2];
}

/// Times one call in the middle; the first one fills caches and does not count.
double middle_seconds(at::Device device, const std::function<void()>& call) {
  seconds_of(device, call);
  std::vector<double> all;
  for (double sum = 0.0;
       all.size() < kFewest || (sum < kSecondsEach && all.size() < kMostRounds);) {
    all.push_back(seconds_of(device, call));
    sum += all.back();
  }
  return middle(all);
}

/// The most of any rank. Collective.
double slowest(World& world, double seconds) {
  double most = 0.0;
  for (const auto& one : comm::all_gather_bytes(world.control(), concat(seconds), "seconds")) {
    most = std::max(most, std::stod(one));
  }
  return most;
}

/// To three digits: no measurement has more.
double rounded(double value) {
  if (value <= 0.0) return 0.0;
  const double unit = std::pow(10.0, std::floor(std::log10(value)) - 2.0);
  // No double is a negative power of 10.
  return unit >= 1.0 ? std::round(value / unit) * unit
                     : std::round(value / unit) / std::round(1.0 / unit);
}

/// A product of squares that is large for the device: operations a second of the slowest rank.
double product_flops(World& world, at::ScalarType dtype, std::int64_t size) {
  const auto options = at::TensorOptions().device(world.device()).dtype(dtype);
  const at::Tensor a = at::full({size, size}, 0.5, options),
                   b = at::full({size, size}, 2.0, options);
  at::Tensor out = at::zeros({size, size}, options);
  comm::barrier(world.control(), "products");
  const double seconds = middle_seconds(world.device(), [&] { base::mm_out(out, a, b); });
  const double operations = 2.0 * std::pow(static_cast<double>(size), 3.0);
  return operations / slowest(world, seconds);
}

/// Read and written.
double copied_bytes_a_second(World& world, std::int64_t bytes) {
  const auto options = at::TensorOptions().device(world.device()).dtype(at::kFloat);
  const at::Tensor from = at::ones({bytes / 4}, options);
  const at::Tensor to = at::zeros({bytes / 4}, options);
  comm::barrier(world.control(), "copies");
  const double seconds = middle_seconds(world.device(), [&] { to.copy_(from); });
  return 2.0 * static_cast<double>(bytes) / slowest(world, seconds);
}

struct Sending {
  double bandwidth = 0.0;  ///< bytes a second that a rank sends
  double latency = 0.0;    ///< seconds
};

/// Seconds of an all-gather of `bytes` in all. As often on every rank: they wait for each other.
double gather_seconds(World& world, comm::Group& group, std::int64_t bytes, std::size_t times) {
  const at::Tensor buffer =
      at::zeros({bytes / 4}, at::TensorOptions().device(world.device()).dtype(at::kFloat));
  std::vector<double> all;
  for (std::size_t i = 0; i <= times; ++i) {
    const double seconds = seconds_of(world.device(), [&] {
      comm::Batch batch{.label = {.kind = comm::Kind::kAllGather, .unit = "measure"}, .ops = {}};
      batch.ops.emplace_back(comm::AllGather{buffer});
      group.issue(std::move(batch))->wait();
    });
    if (i > 0) all.push_back(seconds);
  }
  return middle(all);
}

constexpr std::int64_t kCopiedOnCpu = std::int64_t{128} << 20;
constexpr std::int64_t kSmallest = 256;  ///< bytes of a rank's slice
constexpr std::array<std::int64_t, 4> kSlices{1 << 20, 4 << 20, 8 << 20, 16 << 20};

/// The latency is that of the smallest gather, the bandwidth the slope over large ones: one line
/// through all would have the noise of the large ones for a latency.
Sending measure_sending(World& world, const std::vector<int>& ranks) {
  const auto group = world.group(ranks, "gather");
  const auto size = static_cast<int>(ranks.size());
  constexpr std::size_t kSmallTimes = 200;
  Sending found{.latency =
                    slowest(world, gather_seconds(world, *group, kSmallest * size, kSmallTimes))};
  std::vector<capture::Measured> measured;
  for (const std::int64_t slice : kSlices) {
    const std::int64_t bytes = slice * size;
    constexpr double kBytesEach = 256.0 * (1 << 20);
    const auto times =
        static_cast<std::size_t>(std::clamp(kBytesEach / static_cast<double>(bytes), 3.0, 40.0));
    const double seconds = slowest(world, gather_seconds(world, *group, bytes, times));
    measured.push_back({layout::sent_bytes(bytes, size), 1e3 * seconds});
  }
  const double ms_per_byte = capture::fit(measured).ms_per_byte;
  if (ms_per_byte > 0.0) {
    found.bandwidth = 1e3 / ms_per_byte;
  } else {  // smaller ones took no less: noise
    found.bandwidth = 1e3 * static_cast<double>(measured.back().bytes) / measured.back().ms;
  }
  return found;
}

/// Printable, as machine files have names.
std::string name_of(at::Device device) {
  std::string name = comm::facts_of(device).name;
  if (device.is_cpu()) {
    std::array<char, 100> host{};
    ::gethostname(host.data(), host.size() - 1);
    name = host.data();
  }
  std::ranges::replace_if(name, [](char c) { return c < 0x20 || c >= 0x7f; }, '?');
  return name.empty() ? "this machine" : name.substr(0, 100);
}

/// Ranks of this rank's host, ascending.
struct Hosts {
  std::vector<int> mine;
  int count = 0;
};

Hosts hosts_of(World& world) {
  const std::string kernel = comm::running_kernel();
  const auto all = comm::all_gather_bytes(world.control(), kernel, "hosts");
  std::map<std::string, int> sizes;
  Hosts hosts;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    ++sizes[all[rank]];
    if (all[rank] == kernel) hosts.mine.push_back(static_cast<int>(rank));
  }
  hosts.count = static_cast<int>(sizes.size());
  for (const auto& [host, ranks] : sizes) {
    TESSERA_CHECK(ranks * hosts.count == world.size(), ErrorKind::kUsage, "measure: found ", ranks,
                  " ranks on a host and ", world.size(), " on ", hosts.count,
                  " hosts, expected as many on each");
  }
  return hosts;
}

void measure_computing(World& world, MeasuredMachine& found) {
  const bool on_cpu = world.device().is_cpu();
  const int threads = at::get_num_threads();
  const std::int64_t size = on_cpu ? 1024 : 8192;
  const std::int64_t copied = on_cpu ? kCopiedOnCpu : std::int64_t{1} << 30;
  found.machine.flops =
      check::ProductFlops{.bfloat16 = rounded(product_flops(world, at::kBFloat16, size)),
                          .float32 = rounded(product_flops(world, at::kFloat, size))};
  found.machine.memory_bandwidth = rounded(copied_bytes_a_second(world, copied));
  found.notes.push_back(concat("flops: products of ", size, " x ", size,
                               " matrices, of all ranks at once, ", threads,
                               threads == 1 ? " thread" : " threads", " each; of the slowest"));
  found.notes.push_back(concat("memory_bandwidth: copies of ", size_text(copied),
                               ", what is read and what is written"));
}

void measure_groups(World& world, MeasuredMachine& found) {
  const Hosts hosts = hosts_of(world);
  found.machine.ranks_per_host = static_cast<int>(hosts.mine.size());
  if (hosts.mine.size() > 1) {
    const Sending within = measure_sending(world, hosts.mine);
    found.machine.bandwidth = rounded(within.bandwidth);
    found.machine.latency = rounded(within.latency);
    found.notes.push_back(concat("bandwidth, latency: all-gathers of ", hosts.mine.size(),
                                 " ranks of a host over ", world.backend(), ", of ",
                                 size_text(kSlices.front()), " to ", size_text(kSlices.back()),
                                 " a rank, and of ", kSmallest, " B"));
  } else if (hosts.count == 1) {
    found.notes.emplace_back("bandwidth, latency: not measured, one rank sends nothing");
  }
  if (hosts.count > 1) {
    std::vector<int> everyone;
    for (int rank = 0; rank < world.size(); ++rank) everyone.push_back(rank);
    const Sending beyond = measure_sending(world, everyone);
    found.machine.host_bandwidth = rounded(beyond.bandwidth);
    found.machine.latency = rounded(beyond.latency);
    found.notes.push_back(concat("host_bandwidth, latency: the same of ", world.size(),
                                 " ranks on ", hosts.count, " hosts"));
  } else {
    found.notes.emplace_back("host_bandwidth: not measured, all ranks are on this host");
  }
}

}  // namespace

double available_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    double kib = 0.0;
    if (word == "MemAvailable:" && file >> kib) return 1024.0 * kib;
  }
  return ram_bytes();
}

void require_memory_to_measure(int local, int ranks, double available) {
  constexpr double kProgram = 96.0 * (1 << 20);  // without pages that ranks share
  const double gathered = static_cast<double>(kSlices.back()) * ranks;
  const double taken = local * (kProgram + std::max(2.0 * kCopiedOnCpu, gathered));
  TESSERA_CHECK(taken <= available, ErrorKind::kUsage, "measure: found ", local,
                " ranks on this host of ", ranks, ", which take ", size_text(std::llround(taken)),
                " at once to measure, expected at most the ", size_text(std::llround(available)),
                " that no process has; start fewer (--nproc, or the launcher's)");
}

void require_memory_to_measure(World& world) {
  if (!world.device().is_cpu()) return;
  require_memory_to_measure(static_cast<int>(hosts_of(world).mine.size()), world.size(),
                            available_bytes());
}

MeasuredMachine measure_machine(World& world) {
  MeasuredMachine found;
  found.machine.name = name_of(world.device());
  found.machine.source = check::MachineSource::kMeasured;
  const auto device_bytes =
      world.device().is_cpu() ? std::nullopt : comm::memory_size(world.device());
  measure_computing(world, found);
  measure_groups(world, found);
  const double share = device_bytes ? static_cast<double>(*device_bytes)
                                    : available_bytes() / *found.machine.ranks_per_host;
  found.machine.memory = std::llround(rounded(1.0 / slowest(world, 1.0 / share)));
  found.notes.emplace_back(device_bytes ? "memory: of the device of a rank"
                                        : "memory: what no process has of the host's, by ranks");
  return found;
}

}  // namespace tessera::train
