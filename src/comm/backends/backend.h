// Backends: one row of a table (backends.def) and one folder each.
//
// A World asks its backend for groups, and tells it when to open them again or to close them. The
// rest of a World (store, watch, queue) is the same under all backends. Next: group.h, what a
// backend implements.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/device.h"
#include "comm/group.h"
#include "launch/abort_flag.h"
#include "launch/launch_environment.h"
#include "launch/store.h"
#include "launch/wait_board.h"
#include "tessera/world.h"

namespace tessera::comm {

/// The parameters of a group to be made: its place, and objects that its World shares with it.
struct GroupPlace {
  std::string name;        ///< "gather of ranks 0,1"
  std::vector<int> ranks;  ///< ranks of the world, ascending
  int rank = 0;            ///< this rank, in the world
  /// the device of its tensors: the World's, or the CPU (carries_messages)
  at::Device device;
  WorldOptions options;
  std::shared_ptr<Store> store;
  std::shared_ptr<AbortFlag> abort_flag;
  std::shared_ptr<WaitBoard> board;
  /// How long an error waits for the heartbeats of the other ranks; 0: not at all.
  std::chrono::milliseconds heartbeats{0};

  int self() const;  ///< index into ranks
};

/// Returns "gather" for the group "gather of ranks 0,1".
std::string_view purpose_of(std::string_view group_name);

/// Threads: as World.
class Connections {
 public:
  virtual ~Connections() = default;
  /// Collective. Errors: kComm.
  virtual std::shared_ptr<Group> make_group(const GroupPlace& place) = 0;
  /// Errors: kUsage where groups cannot be opened again after a failure.
  virtual void require_recovery() const {}
  /// Makes the next collective of each group open it again, after a failure. Nothing may be in
  /// flight.
  virtual void reset(int /*epoch*/) {}
  /// Releases the groups that it has made.
  virtual void close() {}
};

struct BackendRow {
  std::string_view name;  ///< WorldOptions::backend, World::backend()
  /// the devices whose tensors it carries directly; none: any
  std::optional<at::DeviceType> device;
  /// whether it carries tensors of other devices through the host's memory
  bool others;
  /// the ThreadBackend under which it connects threads of one process
  std::optional<ThreadBackend> threads;
  bool (*built_in)();               ///< whether it is linked and not stubbed
  DeviceFacts (*facts)(int index);  ///< describes such a device; none where that is unknown
  /// Null where it connects threads only. Errors: kUsage where it is not built in or there is no
  /// device; kComm.
  std::unique_ptr<Connections> (*open)(const LaunchEnvironment& launch);

  bool connects_processes() const { return open != nullptr; }
  bool carries(at::DeviceType type) const { return others || carries_as_they_are(type); }
  bool carries_as_they_are(at::DeviceType type) const { return !device || *device == type; }
  /// Errors: kConfig naming both and what to set.
  void require_carries(at::DeviceType type) const;
};

/// All backends. Those that connect processes come first; "auto" takes one of them: backends.def.
const std::vector<BackendRow>& backends();
/// Returns the backend of that name, which connects processes. Errors: kUsage where there is none
/// of that name; as require_carries().
const BackendRow& backend_named(const std::string& name, at::DeviceType device);
const BackendRow& backend_of(ThreadBackend threads);

}  // namespace tessera::comm
