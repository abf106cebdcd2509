// PointToPointGroup: the Gloo backend's collectives, as transfers between pairs of ranks.
//
// Gloo's own all-gather copies everything once more, its reduce-scatter is a clone and a full
// all-reduce (docs/performance.md), and both match by order only. Here every slice is sent directly
// from its place into its place, sums are formed in rank order (kernels/kernels.h), and every
// transfer carries a tag that is computed from the collective, so that two different ones never
// meet. Gloo's device thread and the threads that issue and wait do all the work. Next: gloo.h.
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

  /// Closes the connections, after a failure; the next issue() opens new ones. Nothing may be in
  /// flight.
  void reset(int epoch);

 private:
  std::unique_ptr<Work> start(Batch batch) override;
  std::unique_ptr<Work> start_one(Batch batch);
  void open();
  /// Connects to all ranks to which the batch sends.
  void connect(const Batch& batch, const Entry& entry);
  void compare(const Batch& batch, const std::shared_ptr<const Entry>& entry);

  std::shared_ptr<Channel> channel_;
  std::unique_ptr<GlooP2P> p2p_;
  int epoch_ = 0;
  bool open_ = false;
  std::uint64_t next_sequence_ = 0;
};

}  // namespace tessera::comm
