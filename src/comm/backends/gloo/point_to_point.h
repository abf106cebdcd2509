// Collectives as transfers between pairs of ranks: what the Gloo backend consists of.
//
// Gloo's own all-gather copies everything once more and its reduce-scatter is a clone and a full
// all-reduce (docs/performance.md), and both match by order alone. Here every slice goes straight
// from its place into its place, sums are formed in rank order (kernels/kernels.h), and every
// transfer carries a tag made from what the collective is, so that two different ones never meet.
// All work is done by Gloo's device thread and by the threads that issue and wait. Next: gloo.h.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/backends/backend.h"
#include "comm/group.h"
#include "launch/abort_flag.h"
#include "launch/wait_board.h"

namespace tessera::comm {

struct ChannelOptions {
  std::string name;          ///< "gather of ranks 0, 1"
  std::vector<int> members;  ///< world ranks
  int self = 0;              ///< index into members
  std::chrono::milliseconds timeout{100000};
  /// Exchange what each rank is about to issue before every collective, and name both where they
  /// differ.
  bool compare_entries = false;
  std::shared_ptr<AbortFlag> abort_flag;
  std::shared_ptr<WaitBoard> board;
  /// Opens the group. Collective; `epoch` counts recoveries. All ranks are connected then, unless
  /// there is an open_pair. `waits_for` hears for which of them (an index) it waits; -1: nobody in
  /// particular.
  std::function<c10::intrusive_ptr<c10d::Backend>(int epoch,
                                                  const std::function<void(int peer)>& waits_for)>
      open;
  /// What opens a backend of this rank and the one at index `peer` alone, in the order of their
  /// indices. Both call it, on the thread that issues; what it returns runs on one of its own.
  std::function<std::function<c10::intrusive_ptr<c10d::Backend>()>(int epoch, int peer)> open_pair;
};

/// All but how it is opened.
ChannelOptions channel_options(const GroupPlace& place);

class Channel;
struct Entry;
class GlooMail;

class PointToPointGroup : public Group {
 public:
  /// Opens the channel. Collective. Errors: kComm.
  explicit PointToPointGroup(ChannelOptions options);
  ~PointToPointGroup() override;

  int rank() const override;
  int size() const override;
  const std::string& name() const override;
  Mail& mail() override;
  GlooMail& gloo_mail();  ///< the same

  /// After a failure: closes the connections; the next issue() opens new ones. Nothing may be under
  /// way.
  void reset(int epoch);

 private:
  std::unique_ptr<Work> start(Batch batch) override;
  void open();
  /// To all that the batch sends to.
  void connect(const Batch& batch, const Entry& entry);
  void compare(const Batch& batch, const std::shared_ptr<const Entry>& entry);

  std::shared_ptr<Channel> channel_;
  std::unique_ptr<GlooMail> mail_;
  int epoch_ = 0;
  bool open_ = false;
  std::uint64_t next_sequence_ = 0;
};

}  // namespace tessera::comm
