#include "tessera/dtype_watch.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "fsdp/dtype_observer.h"
#include "fsdp/runtime/runtime.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// It is a thread-local, since each rank has a thread and callbacks are plain functions.
thread_local DtypeWatch::Observer* t_observer = nullptr;

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& operation) {
  if (t_observer != nullptr) t_observer->begin_operation(operation);
  return nullptr;
}

void ends(const at::RecordFunction& operation, at::ObserverContext*) {
  if (t_observer != nullptr) t_observer->end_operation(operation);
}

template <class F>
void for_tensors(const c10::IValue& value, const F& use) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) use(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) use(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) for_tensors(each, use);
  }
}

}  // namespace

using Observer = DtypeWatch::Observer;

Observer::Observer(fsdp::Runtime& runtime) : runtime_(runtime.shared_from_this()) {
  TESSERA_CHECK(t_observer == nullptr, ErrorKind::kUsage,
                "DtypeWatch: found one on this thread, expected none; end it first");
  for (auto* unit : runtime.units()) {
    unit->cast_buffers();  // a cast gives them other memory
    name_tensors(*unit);
  }
  t_observer = this;
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(begins, ends)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
}

Observer::~Observer() {
  at::removeCallback(callback_);
  t_observer = nullptr;
}

void Observer::name_tensors(const fsdp::Unit& unit) {
  const auto name = [&](const at::Tensor& tensor, std::string what) {
    if (!tensor.has_storage() || tensor.numel() == 0) return;
    const auto begin = tensor.storage_offset();
    named_[{tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), begin}] = {
        begin + tensor.numel(), std::move(what)};
  };
  for (const auto& parameter : unit.parameters()) {
    for (const auto& leaf : parameter->leaves) {
      name(leaf->tensor, "parameter " + parameter->contract.name);
    }
  }
  for (const auto& buffer : unit.buffers) name(buffer.tensor, "buffer " + buffer.contract.name);
}

void Observer::enter(const fsdp::Unit& unit, const std::vector<at::Tensor*>& inputs) {
  const auto& outer = here().frames;
  Frame frame{unit.shown_name(), outer.empty() ? std::nullopt : outer.back().activation};
  if (unit.contract.activation) frame.activation = to_scalar_type(*unit.contract.activation);
  for (std::size_t i = 0; i < inputs.size() && frame.activation; ++i) {
    const auto& tensor = *inputs[i];
    if (!tensor.defined() || !tensor.is_floating_point()) continue;
    if (tensor.scalar_type() == *frame.activation) continue;
    remember(tensor, {concat("input ", i, " of unit ", frame.unit), Origin::Kind::kInput});
  }
  here().frames.push_back(std::move(frame));
}

void Observer::leave() {
  if (auto& frames = here().frames; !frames.empty()) frames.pop_back();
}

Observer::Origin Observer::origin_of(const at::Tensor& tensor) const {
  const auto known = origins_.find(tensor.unsafeGetTensorImpl());
  if (known != origins_.end()) return known->second.second;
  if (tensor.has_storage()) {
    const void* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    auto after = named_.upper_bound({storage, tensor.storage_offset()});
    if (after != named_.begin()) {
      const auto& [place, named] = *--after;
      if (place.first == storage && tensor.storage_offset() < named.end) return {named.name};
    }
  }
  return {"a tensor that is neither parameter, buffer nor input", Origin::Kind::kTable};
}

void Observer::add_input(const at::Tensor& tensor) {
  if (!tensor.is_floating_point()) return;
  const bool clean = tensor.scalar_type() == *here().frames.back().activation;
  here().inputs.push_back(
      {tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
                            : nullptr,
       tensor.scalar_type(), tensor.dim() > 0, clean ? Origin{} : origin_of(tensor)});
}

void Observer::begin_operation(const at::RecordFunction& operation) {
  if (here().depth++ > 0 || here().frames.empty() || !here().frames.back().activation) return;
  here().inputs.clear();
  for (const auto& value : operation.inputs()) {
    for_tensors(value, [&](const at::Tensor& tensor) { add_input(tensor); });
  }
}

void Observer::end_operation(const at::RecordFunction& operation) {
  if (--here().depth > 0 || here().frames.empty() || !here().frames.back().activation) return;
  for (const auto& value : operation.outputs()) {
    for_tensors(value, [&](const at::Tensor& tensor) { look_at(tensor, operation.name()); });
  }
}

void Observer::look_at(const at::Tensor& output, const char* op) {
  const auto activation = *here().frames.back().activation;
  const auto dtype = output.scalar_type();
  if (!output.is_floating_point() || dtype == activation) return;
  const auto* storage = output.has_storage()
                            ? output.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
                            : nullptr;
  // The output is an input, or a view of one: it is not new.
  for (const auto& input : here().inputs) {
    if (input.dtype == dtype && input.storage == storage && storage != nullptr) {
      return remember(output, input.origin);
    }
  }
  const Input* cause = nullptr;
  bool meets_activations = false;
  for (const auto& input : here().inputs) {
    meets_activations =
        meets_activations || input.dtype == activation || input.origin.kind != Origin::Kind::kTable;
    if (input.dtype != dtype) continue;
    const auto rank = [](const Input& each) { return std::pair{each.has_dims, each.origin.kind}; };
    if (cause == nullptr || rank(input) > rank(*cause)) cause = &input;
  }
  if (WideScope::is_open() || !meets_activations) {
    return remember(output,
                    {concat("a tensor that ", op, " made in unit ", here().frames.back().unit),
                     Origin::Kind::kTable});
  }
  const Origin origin = cause != nullptr ? cause->origin : Origin{"the operation itself"};
  report(op, dtype, origin.what);
  // Later uses of the output count, even where a table was the reason.
  remember(output, {origin.what, std::max(origin.kind, Origin::Kind::kInput)});
}

void Observer::remember(const at::Tensor& tensor, Origin origin) {
  origins_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                            std::pair{WeakTensor(tensor.getIntrusivePtr()), std::move(origin)});
}

void Observer::report(const char* op, at::ScalarType found, const std::string& cause) {
  DtypeFinding finding{here().frames.back().unit, op, to_dtype(*here().frames.back().activation),
                       c10::toString(found), cause};
  const auto same = std::ranges::find_if(findings_, [&](const DtypeFinding& each) {
    finding.count = each.count;
    return each == finding;
  });
  if (same != findings_.end()) {
    ++same->count;
    return;
  }
  finding.count = 1;
  findings_.push_back(std::move(finding));
}

Observer* Observer::of(const fsdp::Runtime& runtime) {
  return t_observer != nullptr && t_observer->runtime_.get() == &runtime ? t_observer : nullptr;
}

DtypeWatch::DtypeWatch(const ShardedBase& model)
    : observer_(std::make_unique<Observer>(fsdp::unit_of_handle(model.unit()).runtime())) {}

DtypeWatch::~DtypeWatch() = default;

std::vector<DtypeFinding> DtypeWatch::findings() const { return observer_->findings(); }

std::string to_string(const std::vector<DtypeFinding>& findings) {
  std::string text;
  for (const auto& each : findings) {
    text += concat("unit ", each.unit, ": ", each.op, " gave ", each.found, ", expected ",
                   to_string(each.expected), ", because of ", each.cause);
    if (each.count > 1) text += concat(" (", each.count, " times)");
    text += "\n";
  }
  return text;
}

}  // namespace tessera
