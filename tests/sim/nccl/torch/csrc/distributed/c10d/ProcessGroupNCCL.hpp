// The stand-in for c10d's class of this name: the functions that our NCCL backend calls, between
// ranks that are threads on simulated devices (stand_in.h). Only the files of
// src/comm/backends/nccl as tests/sim/nccl compiles them find it before libtorch's own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace c10d {

class ProcessGroupNCCL final : public c10::intrusive_ptr_target {
 public:
  struct Options final : c10::intrusive_ptr_target {
    static c10::intrusive_ptr<Options> create(bool /*of_higher_priority*/) {
      return c10::make_intrusive<Options>();
    }
    std::chrono::milliseconds timeout{0};
  };

  ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank, int size,
                   const c10::intrusive_ptr<Options>& options);
  ~ProcessGroupNCCL() override;

  void setBoundDeviceId(std::optional<at::Device> device);
  /// Blocks the host until all ranks have come.
  void eagerConnectSingleDevice(at::Device device);
  void shutdown();
  ErrorType getError();

  void startCoalescing();
  c10::intrusive_ptr<Work> endCoalescing();
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const AllgatherOptions& options);
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const ReduceScatterOptions& options);
  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor>& tensors,
                                     const AllreduceOptions& options);
  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& tensors,
                                     const BroadcastOptions& options);
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<std::int64_t>& receives,
                                         std::vector<std::int64_t>& sends,
                                         const AllToAllOptions& options);
  /// The first message between two ranks blocks the host until the other one makes one, too.
  c10::intrusive_ptr<Work> send(std::vector<at::Tensor>& tensors, int peer, int tag);
  c10::intrusive_ptr<Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag);

 private:
  class Here;
  std::unique_ptr<Here> here_;
};

}  // namespace c10d
