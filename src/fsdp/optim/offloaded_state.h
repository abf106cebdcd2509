// Optimizer state that lies in a tier between updates, and how an update streams through it.
//
// What is kept of a parameter lies in parts of kMasterPart elements, one behind the other, each
// with all of its tensors: so that a stretch of the tier is a chunk that can be read, updated and
// written by itself. Two chunks are in memory at a time: while one is updated, the one before it is
// written and the one behind it is read into the same buffer. That order is the tier's own, so two
// buffers are as good as three. Since an optimizer's kernels treat such a part as they would the
// whole (state_of_units.h), no bit of an update depends on it. Next: state_tier.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "fsdp/optim/state_of_units.h"
#include "fsdp/optim/state_tier.h"
#include "layout/range.h"
#include "tessera/optim.h"

namespace tessera::fsdp {

/// What is kept of one parameter: tensors of as many elements each.
struct KeptForm {
  std::vector<at::ScalarType> dtypes;
  std::int64_t numel = 0;
  std::vector<std::int64_t> element_sizes() const;
  bool operator==(const KeptForm&) const = default;
};

/// Threads: one.
class OffloadedState {
 public:
  explicit OffloadedState(std::unique_ptr<StateTier> tier) : tier_(std::move(tier)) {}

  /// A place for one parameter, with undefined contents: its number. Before anything is written to
  /// it: reserve().
  std::size_t add(KeptForm form);
  /// Room for all places, of which these are in use from now on. Errors: kIo.
  void reserve(std::span<const std::size_t> in_use);
  /// Forgets all places.
  void clear();
  const KeptForm& form(std::size_t place) const { return places_.at(place).form; }

  /// Elements of one tensor from `begin` on. Errors: kIo.
  void read(std::size_t place, std::size_t tensor, std::int64_t begin, const at::Tensor& to);
  /// All of them. Errors: kIo.
  void write(std::size_t place, std::span<const at::Tensor> tensors);

  /// A parameter that is updated.
  struct Updated {
    std::size_t place = 0;
    bool is_new = false;  ///< nothing of it was written yet, and nothing is read
  };
  /// A stretch of one parameter, of which all is in memory for as long as it is updated.
  struct Window {
    std::size_t index = 0;  ///< of the Updated
    layout::Range elements;
    std::vector<at::Tensor> kept;
  };
  /// Calls `meanwhile` once, while the first chunks are read, and `update` for the windows of one
  /// chunk after the other; keeps what it leaves in them. Errors: kIo; those of both, and then some
  /// chunks are updated and others are not.
  void stream(const std::vector<Updated>& updated, const std::function<void()>& meanwhile,
              const std::function<void(std::span<const Window>)>& update);

  std::size_t buffer_bytes() const;
  /// Of the last stream().
  const OffloadTraffic& traffic() const { return traffic_; }

 private:
  struct Place {
    KeptForm form;
    std::int64_t offset = 0;
  };
  struct Chunk {
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
    bool is_read = false;  ///< some of it was written before
    struct Part {
      std::size_t index;
      layout::Range elements;
      std::int64_t offset;  ///< in the chunk
    };
    std::vector<Part> parts;
  };

  std::vector<Chunk> chunks_of(const std::vector<Updated>& updated) const;
  std::vector<Window> windows_of(const Chunk& chunk, const std::vector<Updated>& updated,
                                 const at::Tensor& buffer) const;
  void make_buffers();
  void run(const std::vector<Chunk>& chunks, const std::vector<Updated>& updated,
           const std::function<void()>& meanwhile,
           const std::function<void(std::span<const Window>)>& update);
  void wait(StateTier::Ticket ticket);

  std::unique_ptr<StateTier> tier_;
  std::vector<Place> places_;
  std::int64_t end_ = 0;
  std::int64_t chunk_bytes_ = 0;
  std::array<at::Tensor, 2> buffers_;  // kByte, kept from update to update
  OffloadTraffic traffic_;
};

}  // namespace tessera::fsdp
