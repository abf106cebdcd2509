// Collectives as transfers between pairs of ranks: what the Gloo backend consists of.
//
// Gloo's own all-gather copies everything once more and its reduce-scatter is a clone and a full
// all-reduce (docs/communication.md, Backends), and both match by order alone. Here every slice goes straight
// from its place into its place, sums are formed in rank order (kernels/kernels.h), and every
// transfer carries a tag made from what the collective is, so that two different ones never meet.
// All work is done by Gloo's device thread and by the threads that issue and wait. Next: gloo.h.
#pragma once

#include <memory>
#include <string>

#include "comm/backends/gloo/transport.h"
#include "comm/group.h"

namespace tessera::comm {

class GlooP2P;

class PointToPointGroup : public Group {
 public:
  /// Opens the channel. Collective. Errors: kComm.
  explicit PointToPointGroup(ChannelOptions options);
  ~PointToPointGroup() override;

  int rank() const override;
  int size() const override;
  const std::string& name() const override;
  P2P& p2p() override;
  GlooP2P& gloo_p2p();  ///< the same

  /// After a failure: closes the connections; the next issue() opens new ones. Nothing may be under
  /// way.
  void reset(int epoch);

 private:
  std::unique_ptr<Work> start(Batch batch) override;
  std::unique_ptr<Work> start_one(Batch batch);
  void open();
  /// To all that the batch sends to.
  void connect(const Batch& batch, const Entry& entry);
  void compare(const Batch& batch, const std::shared_ptr<const Entry>& entry);

  std::shared_ptr<Channel> channel_;
  std::unique_ptr<GlooP2P> p2p_;
  int epoch_ = 0;
  bool open_ = false;
  std::uint64_t next_sequence_ = 0;
};

}  // namespace tessera::comm
