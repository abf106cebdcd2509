// Backends: one row of a table (backends.def) and one folder each.
//
// A World asks its backend for groups, and tells it when they are to be opened again or closed; what
// else it has (store, watch, queue) is the same under all. Next: group.h, what a backend implements.
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

/// A group that is made, and what its World lends it.
struct GroupPlace {
  std::string name;        ///< "gather of ranks 0,1"
  std::vector<int> ranks;  ///< of the world, ascending
  int rank = 0;            ///< of the world: this one
  at::Device device;       ///< of its tensors: the World's, or the CPU (carries_messages)
  WorldOptions options;
  std::shared_ptr<Store> store;
  std::shared_ptr<AbortFlag> abort_flag;
  std::shared_ptr<WaitBoard> board;
  /// For how long an error listens which of the others still live; 0: not at all.
  std::chrono::milliseconds heartbeats{0};

  int self() const;  ///< index into ranks
};

/// "gather", of the group "gather of ranks 0,1".
std::string_view purpose_of(std::string_view group_name);

/// Threads: as World.
class Connections {
 public:
  virtual ~Connections() = default;
  /// Collective. Errors: kComm.
  virtual std::shared_ptr<Group> make_group(const GroupPlace& place) = 0;
  /// Errors: kUsage where groups cannot be opened again after a failure.
  virtual void require_recovery() const {}
  /// After a failure: the next collective of each group opens it again. Nothing may be under way.
  virtual void reset(int /*epoch*/) {}
  /// Lets go of the groups that it has made.
  virtual void close() {}
};

struct BackendRow {
  std::string_view name;                 ///< WorldOptions::backend, World::backend()
  std::optional<at::DeviceType> device;  ///< whose tensors it carries as they are; none: any
  bool others;                           ///< carries all others' through the host's memory
  std::optional<ThreadBackend> threads;  ///< under which it connects threads of one process
  bool (*built_in)();                    ///< linked, not stubbed
  DeviceFacts (*facts)(int index);       ///< of one of these devices; none where it cannot tell
  /// Null where it connects threads only. Errors: kUsage where it is not built in, or there is no
  /// device; kComm.
  std::unique_ptr<Connections> (*open)(const LaunchEnvironment& launch);

  bool connects_processes() const { return open != nullptr; }
  bool carries(at::DeviceType type) const { return others || carries_as_they_are(type); }
  bool carries_as_they_are(at::DeviceType type) const { return !device || *device == type; }
  /// Errors: kConfig naming both and what to set.
  void require_carries(at::DeviceType type) const;
};

/// Those that connect processes first; "auto" is one of these: backends.def.
const std::vector<BackendRow>& backends();
/// Of processes. Errors: kUsage where there is none of that name; as require_carries().
const BackendRow& backend_named(const std::string& name, at::DeviceType device);
const BackendRow& backend_of(ThreadBackend threads);

}  // namespace tessera::comm
