// What a DtypeWatch knows: whose tensors are whose, and where a wide one came from.
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

  /// The watch of this thread on units of `runtime`, or null.
  static Observer* of(const fsdp::Runtime& runtime);

  // --- called around a unit's forward ---
  void enter(const fsdp::Unit& unit, const std::vector<at::Tensor*>& inputs);
  void leave();

  // --- called around every operation ---
  void begin_operation(const at::RecordFunction& operation);
  void end_operation(const at::RecordFunction& operation);

  const std::vector<DtypeFinding>& findings() const { return findings_; }

 private:
  /// Where a tensor that is not of the unit's activation dtype came from.
  struct Origin {
    std::string what;
    /// What names it best comes first: parameters and buffers, then inputs. A table that is made
    /// on the way, or kept by a module, has nothing to do with activations until it meets some.
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
  /// The calls that are under way in a pass of the rank.
  struct Pass {
    int depth = 0;  // operations call operations: what counts is the one that the module called
    std::vector<Frame> frames;
    std::vector<Input> inputs;  // of that operation
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

  std::shared_ptr<fsdp::Runtime> runtime_;  // the address is no other's while this looks
  at::CallbackHandle callback_ = 0;
  std::array<Pass, base::kPasses> passes_;
  /// By storage and first element: several parameters lie in one storage.
  std::map<std::pair<const void*, std::int64_t>, Named> named_;
  /// Weak references: a tensor that is gone leaves its address to no other while one is held.
  std::unordered_map<const c10::TensorImpl*, std::pair<WeakTensor, Origin>> origins_;
  std::vector<DtypeFinding> findings_;
};

}  // namespace tessera
