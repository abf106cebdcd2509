// The state of a DtypeWatch: the names of tensors, and the origins of wide ones.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/pass_local.h"
#include "fsdp/runtime/unit.h"
#include "tessera/dtype_watch.h"

namespace tessera {

class DtypeWatch::Observer {
 public:
  explicit Observer(fsdp::Runtime& runtime);
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  /// Returns the watch of this thread on units of `runtime`, or null.
  static Observer* of(const fsdp::Runtime& runtime);

  // --- called around a unit's forward ---
  void enter(const fsdp::Unit& unit, const std::vector<at::Tensor*>& inputs);
  void leave();

  // --- called around every operation ---
  void begin_operation(const at::RecordFunction& operation);
  void end_operation(const at::RecordFunction& operation);

  const std::vector<DtypeFinding>& findings() const { return findings_; }

 private:
  /// The origin of a tensor that does not have the unit's activation dtype.
  struct Origin {
    std::string what;
    /// The origin with the highest kind is reported: parameters and buffers, then inputs. A table
    /// that an operation made or a module keeps has nothing to do with activations before it meets
    /// one.
    enum class Kind : std::uint8_t { kTable, kInput, kNamed } kind = Kind::kNamed;
  };
  /// One floating input of the operation under way.
  struct Input {
    const c10::StorageImpl* storage;
    at::ScalarType dtype;
    bool has_dims;  ///< a tensor without dims does not widen one that has some
    Origin origin;
  };
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Frame {
    std::string unit;
    std::optional<at::ScalarType> activation;
  };
  /// The calls under way in one pass of the rank.
  struct Pass {
    int depth = 0;  // depth of operations: only the outermost, which the module calls, counts
    std::vector<Frame> frames;
    std::vector<Input> inputs;  // of the outermost operation
  };
  struct Named {
    std::int64_t end;
    std::string name;
  };

  Pass& here() { return passes_[base::pass_here()]; }
  void name_tensors(const fsdp::Unit& unit);
  void add_input(const at::Tensor& tensor);
  Origin origin_of(const at::Tensor& tensor) const;
  void look_at(const at::Tensor& output, const char* op);
  void remember(const at::Tensor& tensor, Origin origin);
  void report(const char* op, at::ScalarType found, const std::string& cause);

  std::shared_ptr<fsdp::Runtime> runtime_;  // held, so that its address stays unique
  at::CallbackHandle callback_ = 0;
  std::array<Pass, base::kPasses> passes_;
  /// By storage and first element, since a storage may hold several parameters.
  std::map<std::pair<const void*, std::int64_t>, Named> named_;
  /// Weak references keep the address of a destroyed tensor from being used again.
  std::unordered_map<const c10::TensorImpl*, std::pair<WeakTensor, Origin>> origins_;
  std::vector<DtypeFinding> findings_;
};

}  // namespace tessera
