#include "checkpoint/loader.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <ranges>
#include <set>
#include <utility>

#include "base/log.h"
#include "base/text/printable.h"
#include "checkpoint/snapshot.h"
#include "comm/group.h"
#include "fsdp/runtime/model_names.h"
#include "grad/torch_dtype.h"
#include "tessera/dtype.h"
#include "tessera/error.h"

namespace tessera::checkpointing {
namespace {

class Loader {
 public:
  /// Collective.
  Loader(const CheckpointFolder& checkpoint, const ShardedBase& model, Optimizer& optimizer,
         const LoadRequest& request)
      : checkpoint_(checkpoint),
        model_(model),
        optimizer_(optimizer),
        request_(request),
        forms_(request.forms),
        advice_(request.advice),
        names_(model),
        stages_(names_of_stages(model, request.holds)),
        kept_names_(kept_in_stages(model, optimizer)),
        in_stage_(place_among(model.mesh().shapes().stage_of(model.mesh().world()->rank()),
                              model.mesh())) {}

  /// Checks this rank's share of its stage's parameters, and of all tensors of the checkpoint: no
  /// rank reads the entries of every tensor. Errors: kFormat, kConfig for tensors that do not fit
  /// model and optimizer.
  void check() {
    // The names of all stages: what other stages have is checked there.
    std::set<std::string> known;
    for (const auto& [is_buffer, names] : stages_.everywhere) {
      for (const std::string& name : is_buffer ? names : std::vector{name_there(names)}) {
        for (const std::string& tensor : forms_.names_of(name)) {
          known.insert(concat(kModelPrefix, tensor));
        }
      }
    }
    std::size_t index = 0;
    for (const auto& view : model_.shards()) {
      const auto& contract = *view.contract;
      if (!holds(contract)) continue;
      if (!is_mine(index++)) continue;
      const FileForm form = form_of(contract);
      for (const std::string& tensor : form.names) {
        require_tensor(concat(kModelPrefix, tensor), contract.storage.dtype, form.file.shape,
                       contract.trainable ? advice_.keeps_storage : advice_.keeps_frozen);
      }
    }
    for (const auto& [names, view] : buffers()) {
      const auto& contract = *view.contract;
      const auto there = buffer_there(names, contract);
      for (const auto& name : there) {
        require_tensor(concat(kModelPrefix, name),
                       name == there.front() ? contract.storage : dtype_there(name, contract),
                       contract.shape, advice_.keeps_storage);
      }
    }
    const World& world = *model_.mesh().world();
    const auto names = checkpoint_.names("", static_cast<std::size_t>(world.rank()),
                                         static_cast<std::size_t>(world.size()));
    check_optimizer_kind(names);
    index = 0;
    for (const auto& state : optimizer_.state()) {
      if (is_mine(index++)) check_state(*state.view.contract);
    }
    has_state_ = std::ranges::any_of(
        names, [](const auto& name) { return name.starts_with(kOptimizerPrefix); });
    for (const auto& name : names) {
      TESSERA_CHECK(!name.starts_with(kModelPrefix) || known.contains(name), ErrorKind::kFormat,
                    shown(checkpoint_.path()), ": found the tensor ", printable(name),
                    ", expected only those of the model");
    }
  }

  /// Called after check(). A parameter without state was never updated, or frozen until now: rank 0
  /// only warns of it. But a run that has updated no parameter must have left out every step.
  /// Collective: every rank is here, also one that trains nothing or has found nothing. Errors:
  /// kFormat.
  void require_some_state() const {
    comm::Group& group = model_.mesh().world()->control();
    const auto& manifest = checkpoint_.manifest();
    const auto left_out = manifest.left_out();
    const auto trained = optimizer_.state();
    const auto any = comm::any_of_ranks(
        group, {has_state_, !without_state_.empty(), !trained.empty()}, "state in the checkpoint");
    const bool has_state = any[0], lacks_some = any[1], trains = any[2];
    if (manifest.step <= left_out || !trains) return;
    if (has_state) {
      if (lacks_some) warn_of_missing_state(group);
      return;
    }
    const auto kept = kept_names_.empty() ? std::string("step") : *kept_names_.begin();
    const auto first = first_of_ranks(
        group, trained.empty() ? "" : form_of(*trained.front().view.contract).names.front());
    throw Error(ErrorKind::kFormat,
                concat(shown(checkpoint_.path()), ": found no ", named(kept, first),
                       " and no other state of an optimizer, expected what ", optimizer_.name(),
                       " kept in ", manifest.step - left_out,
                       " updates; take a checkpoint that has it, or ", advice_.weights_alone));
  }

  /// Reads the files for which `is_mine` through once: verifies them, and fills the tensors in
  /// them.
  void verify(const std::function<bool(std::size_t file)>& is_mine) {
    std::map<std::string, std::vector<WantedBytes>> mine;
    const auto files = checkpoint_.data_files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      if (is_mine(i)) mine[files[i]] = {};
    }
    for (const auto& part : parts()) want(part, mine);
    const auto& listed = checkpoint_.manifest().files;
    std::int64_t total = 0;
    for (const auto& [file, wanted] : mine) total += listed.find(file)->second.bytes;
    const auto read = [&](std::int64_t bytes) {
      if (request_.on_read) request_.on_read(bytes, total);
    };
    read(0);
    for (auto& [file, wanted] : mine) {
      checkpoint_.verify(file, std::move(wanted));
      read(listed.find(file)->second.bytes);
    }
  }

  /// Fills the rest, once all files are verified.
  void fill_rest() {
    for (const auto& part : rest_) read_part(part);
    upload();
    fill_buffers();
    mark_written();
    for (const auto& state : optimizer_.state()) {
      const auto& contract = *state.view.contract;
      const FileForm form = form_of(contract);
      const std::string& first = form.names.front();  // the others have the same
      if (!has("step", first)) continue;
      std::int64_t steps = 0;
      checkpoint_.read(named("step", first), 0, 1, std::as_writable_bytes(std::span(&steps, 1)));
      TESSERA_CHECK(steps > 0 && steps <= checkpoint_.manifest().step, ErrorKind::kFormat,
                    shown(checkpoint_.path()), ": found ", steps, " in ", named("step", first),
                    ", expected 1 to the ", checkpoint_.manifest().step,
                    " steps of the run; take a checkpoint that was not altered");
      optimizer_.set_steps(contract.name, steps);
    }
  }

 private:
  /// Elements of a box of a tensor, and this rank's memory for them.
  struct Part {
    std::string name;
    TensorBox box;
    layout::Range elements;  ///< a range of the box
    std::span<std::byte> bytes;
  };

  /// No rank writes a tensor without elements, so it may be missing.
  static bool is_empty(const std::vector<std::int64_t>& shape) {
    return std::ranges::find(shape, 0) != shape.end();
  }

  /// `hint` ends the error about another dtype.
  void require_tensor(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape,
                      const char* hint) const {
    const auto* tensor = checkpoint_.find(name);
    if (tensor == nullptr && is_empty(shape)) return;
    TESSERA_CHECK(tensor != nullptr, ErrorKind::kFormat, shown(checkpoint_.path()),
                  ": found no tensor ", printable(name), ", expected one");
    TESSERA_CHECK(tensor->dtype == dtype && tensor->shape == shape, ErrorKind::kFormat,
                  shown(checkpoint_.path()), ": tensor ", printable(name), ": found ",
                  to_string(tensor->dtype), " ", shape_text(tensor->shape), ", expected ",
                  to_string(dtype), " ", shape_text(shape), "; ",
                  tensor->shape == shape ? hint : advice_.keeps_shape);
  }

  /// Notes that bytes were written past the tensors: units that are unsharded gather the new
  /// values, and what the optimizer keeps belongs to them. Also needed where this rank owns no
  /// element.
  void mark_written() const {
    for (const auto& view : model_.shards()) {
      if (holds(*view.contract)) view.shard.unsafeGetTensorImpl()->bump_version();
    }
    for (const auto& state : optimizer_.state()) {
      if (!state.kept.empty()) optimizer_.make_kept(state.view.contract->name);
    }
  }

  void read_part(const Part& part) const {
    const auto [begin, end] = part.elements;
    checkpoint_.read_box(part.name, part.box, begin, end, part.bytes);
  }

  /// Returns the first text of any rank that is not empty. Collective.
  static std::string first_of_ranks(comm::Group& group, const std::string& mine) {
    const auto all = comm::all_gather_bytes(group, mine, "names of the checkpoint");
    const auto first = std::ranges::find_if(all, [](const auto& one) { return !one.empty(); });
    return first == all.end() ? "" : *first;
  }

  /// Collective.
  void warn_of_missing_state(comm::Group& group) const {
    const auto missing = static_cast<std::int64_t>(without_state_.size());
    const auto count = comm::sum_of_ranks(group, {missing}, "state that is missing")[0];
    const auto first = first_of_ranks(group, missing == 0 ? "" : without_state_.front());
    if (model_.rank() != 0) return;
    log::warn("checkpoint ", shown(checkpoint_.path()), ": found no optimizer's state of ", count,
              " trained parameter(s), as ", first,
              ": it starts from zero, as for what was never updated or was frozen until now");
  }

  /// Buffers are whole on every rank, and small: each rank reads them in the dtype in which they
  /// are stored, and casts them as after any load.
  void fill_buffers() const {
    const at::NoGradGuard no_grad;
    if (request_.holds) return;
    for (const auto& [names, view] : buffers()) {
      const auto there = buffer_there(names, *view.contract);
      const auto values = read_buffer(there.front(), *view.contract);
      for (const auto& other : there | std::views::drop(1)) {
        const auto same = read_buffer(other, *view.contract);
        const auto cast = values.to(same.scalar_type());
        TESSERA_CHECK(std::memcmp(same.const_data_ptr(), cast.const_data_ptr(), cast.nbytes()) == 0,
                      ErrorKind::kFormat, shown(checkpoint_.path()), ": found other values in ",
                      printable(concat(kModelPrefix, other)), " than in ",
                      printable(concat(kModelPrefix, there.front())),
                      ", expected the same, since the model has one tensor for both; ",
                      advice_.keeps_shape);
      }
      view.tensor.set_data(values.to(view.tensor.device()));
    }
    model_.set_loaded();
  }

  at::Tensor read_buffer(const std::string& name, const BufferContract& contract) const {
    const auto dtype = to_scalar_type(dtype_there(name, contract));
    auto values = at::empty(contract.shape, at::TensorOptions().dtype(dtype));
    if (!is_empty(contract.shape)) {
      checkpoint_.read(concat(kModelPrefix, name), 0, values.numel(),
                       {static_cast<std::byte*>(values.mutable_data_ptr()), values.nbytes()});
    }
    return values;
  }

  std::vector<fsdp::NamedBuffer> buffers() const {
    return request_.holds ? std::vector<fsdp::NamedBuffer>() : names_.stored_buffers(model_);
  }

  /// Returns the names under which the checkpoint has a tensor of the model: the canonical one,
  /// unless it was saved when another one was canonical. A single name is not looked up.
  std::vector<std::string> names_there(const std::vector<std::string>& names) const {
    if (names.size() == 1) return names;
    auto there = names;
    std::erase_if(there, [&](const auto& name) {
      return checkpoint_.find(concat(kModelPrefix, name)) == nullptr;
    });
    return there.empty() ? std::vector{names.front()} : there;
  }
  /// names_there() of a buffer, those in its storage dtype first. Older checkpoints may have it
  /// also in a narrower dtype, under its name in a unit that was sharded after another unit had
  /// cast it.
  std::vector<std::string> buffer_there(const std::vector<std::string>& names,
                                        const BufferContract& contract) const {
    auto there = names_there(names);
    std::ranges::stable_partition(
        there, [&](const auto& name) { return dtype_there(name, contract) == contract.storage; });
    return there;
  }
  /// Returns the dtype of a buffer in the checkpoint; its storage dtype where another one is a
  /// mistake.
  DType dtype_there(const std::string& name, const BufferContract& contract) const {
    const auto* tensor = checkpoint_.find(concat(kModelPrefix, name));
    const bool is_narrower = tensor != nullptr && is_floating(tensor->dtype) &&
                             represents(contract.storage, tensor->dtype);
    return is_narrower ? tensor->dtype : contract.storage;
  }
  std::string name_there(const std::vector<std::string>& names) const {
    return names_there(names).front();
  }
  FileForm form_of(const GradContract& contract) const {
    return forms_.of(contract, name_there(names_.of(contract)));
  }

  static std::string named(const std::string& kept, const std::string& tensor) {
    return concat(kOptimizerPrefix, kept, "/", tensor);
  }

  bool is_mine(std::size_t index) const {
    return static_cast<int>(index % static_cast<std::size_t>(in_stage_.ranks)) == in_stage_.rank;
  }

  bool holds(const GradContract& contract) const {
    return !request_.holds || request_.holds(contract.name);
  }

  bool has(const std::string& kept, const std::string& tensor) const {
    return checkpoint_.find(named(kept, tensor)) != nullptr;
  }
  bool keeps_any(const FileForm& form) const {
    return std::ranges::any_of(form.names, [&](const std::string& tensor) {
      return std::ranges::any_of(kept_names_, [&](const auto& kept) { return has(kept, tensor); });
    });
  }

  void check_optimizer_kind(const std::vector<std::string>& names) const {
    const auto& written = checkpoint_.manifest().optimizer;
    TESSERA_CHECK(written.empty() || written == optimizer_.name(), ErrorKind::kConfig,
                  advice_.optimizer, ": found ", printable(optimizer_.name()), ", expected ",
                  printable(written, 256), " of the checkpoint ", shown(checkpoint_.path()), "; ",
                  advice_.keeps_optimizer);
    std::set<std::string> found;
    for (const auto& name : names) {
      if (!name.starts_with(kOptimizerPrefix)) continue;
      const auto begin = kOptimizerPrefix.size();
      found.insert(name.substr(begin, name.find('/', begin) - begin));
    }
    found.erase("step");
    TESSERA_CHECK(std::includes(kept_names_.begin(), kept_names_.end(), found.begin(), found.end()),
                  ErrorKind::kConfig, advice_.optimizer, ": found an optimizer that keeps ",
                  joined(kept_names_, "none"), ", expected one that keeps ", joined(found, "none"),
                  " as the checkpoint ", shown(checkpoint_.path()), " does; ",
                  advice_.keeps_optimizer);
  }

  /// Requires all or nothing of what the optimizer keeps of a parameter: one that was never
  /// updated, or frozen until now, has nothing.
  void check_state(const GradContract& contract) {
    const auto name = names_.of(contract).front();
    if (is_empty(contract.shape)) return;
    const FileForm form = form_of(contract);
    const bool kept_any = keeps_any(form);
    const bool has_step =
        std::ranges::any_of(form.names, [&](const auto& tensor) { return has("step", tensor); });
    if (!kept_any && !has_step && !stages_.of_earlier.contains(name)) {
      without_state_.push_back(name);
    }
    if (kept_any || has_step) {
      for (const std::string& tensor : form.names) {
        require_tensor(named("step", tensor), DType::kInt64, {}, advice_.keeps_storage);
      }
    }
    const auto states = optimizer_.states_of(contract);
    const auto due =
        std::ranges::find(states, KeptTensor::Begins::kWithTheFirstUpdate, &KeptTensor::begins);
    TESSERA_CHECK(kept_any || !has_step || due == states.end(), ErrorKind::kConfig,
                  advice_.optimizer, ": found ", optimizer_.name(), " and no ",
                  due == states.end() ? "" : named(due->name, form.names.front()),
                  " in the checkpoint ", shown(checkpoint_.path()),
                  ", expected the moments of all that was updated, or an optimizer that keeps none "
                  "as there; ",
                  advice_.keeps_optimizer);
    if (!kept_any) return;
    for (const auto& [kept, dtype] : optimizer_.kept_dtypes(contract)) {
      for (const std::string& tensor : form.names) {
        require_tensor(named(kept, tensor), dtype, form.file.shape, advice_.keeps_master);
      }
    }
  }

  /// Adds the values of a shard; the checkpoint names their tensors `prefix` and the file's name.
  void add_parts(std::vector<Part>& parts, const std::string& prefix, const FileForm& form,
                 const ShardView& view, const at::Tensor& values) {
    auto* const data = static_cast<std::byte*>(on_host(values).mutable_data_ptr());
    const auto size = static_cast<std::int64_t>(values.element_size());
    for (layout::Piece& piece : pieces_of(view, form.file)) {
      parts.push_back({prefix + form.names[piece.tensor],
                       std::move(piece.box),
                       piece.in_box,
                       {data + (piece.local.begin - view.begin) * size,
                        static_cast<std::size_t>(piece.local.size() * size)}});
    }
  }

  /// Returns the tensor to which values are read: `values`, or a twin that upload() copies to the
  /// device.
  at::Tensor on_host(const at::Tensor& values) {
    if (values.is_cpu()) return values;
    const at::Tensor twin = at::empty(values.sizes(), at::TensorOptions(values.scalar_type()));
    twins_.emplace_back(values, twin);
    return twin;
  }

  void upload() {
    const at::NoGradGuard no_grad;
    for (; !twins_.empty(); twins_.pop_back()) twins_.back().first.copy_(twins_.back().second);
  }

  std::vector<Part> parts() {
    const at::NoGradGuard no_grad;
    std::vector<Part> found;
    for (const auto& view : model_.shards()) {
      if (!holds(*view.contract)) continue;
      add_parts(found, std::string(kModelPrefix), form_of(*view.contract), view,
                view.shard.detach());
    }
    auto states = optimizer_.state();
    for (auto& state : states) {
      state.kept.clear();  // it would exist in addition to the new one until the last is made
      const auto& contract = *state.view.contract;
      const FileForm form = form_of(contract);
      optimizer_.forget(contract.name);
      if (!keeps_any(form)) continue;
      for (const auto& kept : optimizer_.make_kept(contract.name)) {
        add_parts(found, named(kept.name, ""), form, state.view, kept.values);
      }
    }
    return found;
  }

  /// Reads a part together with the files of `mine` that hold it; otherwise it waits for
  /// fill_rest().
  void want(const Part& part, std::map<std::string, std::vector<WantedBytes>>& mine) {
    const auto [begin, end] = part.elements;
    const auto chunks = checkpoint_.chunks(part.name, part.box, begin, end);
    if (chunks.empty()) return rest_.push_back(part);
    const auto size = static_cast<std::int64_t>(part.bytes.size()) / part.elements.size();
    for (const auto& one : chunks) {
      const auto bytes =
          part.bytes.subspan(static_cast<std::size_t>((one.elements.begin - begin) * size),
                             static_cast<std::size_t>(one.elements.size() * size));
      const auto file = mine.find(one.file);
      if (file != mine.end()) {
        file->second.push_back({one.offset, bytes});
      } else {
        rest_.push_back({part.name, part.box, one.elements, bytes});
      }
    }
  }

  const CheckpointFolder& checkpoint_;
  const ShardedBase& model_;
  Optimizer& optimizer_;
  const LoadRequest& request_;
  const FileForms& forms_;
  const LoadAdvice& advice_;
  const fsdp::ModelNames names_;
  const NamesOfStages stages_;
  const std::set<std::string> kept_names_;
  const Place in_stage_;
  bool has_state_ = false;                  // in this rank's share of all tensors
  std::vector<std::string> without_state_;  // in this rank's share of trained parameters
  std::vector<Part> rest_;
  std::vector<std::pair<at::Tensor, at::Tensor>> twins_;  // on the device, on the host
};

}  // namespace

CheckpointFolder open_on_all_ranks(World& world, const std::function<CheckpointFolder()>& open) {
  std::optional<CheckpointFolder> checkpoint;
  comm::on_all_or_none(world, "opening the checkpoint", [&] { checkpoint = open(); });
  const auto hash = to_string(checkpoint->manifest_hash());
  const auto first = comm::from_first_rank(world, "hash of the manifest", hash);
  comm::on_all_or_none(world, "the same manifest", [&] {
    TESSERA_CHECK(hash == first, ErrorKind::kIo, shown(checkpoint->path()),
                  ": found a manifest with hash ", hash, ", expected ", first,
                  " as on rank 0; do all hosts share the folder of checkpoints?");
  });
  return std::move(*checkpoint);
}

void load(const CheckpointFolder& checkpoint, const ShardedBase& model, Optimizer& optimizer,
          World& world, const LoadRequest& request) {
  Loader loader(checkpoint, model, optimizer, request);
  comm::on_all_or_none(world, "tensors of the checkpoint", [&] { loader.check(); });
  loader.require_some_state();
  comm::on_all_or_none(world, "verifying the checkpoint", [&] {
    // With the layout that wrote it, a rank verifies the file that it needs.
    loader.verify(
        [&](std::size_t file) { return static_cast<int>(file) % world.size() == world.rank(); });
  });
  comm::on_all_or_none(world, "reading the checkpoint", [&] { loader.fill_rest(); });
  if (world.rank() != 0) return;
  log::info("resumed from ", checkpoint.path().native(), ", written by ",
            checkpoint.manifest().world_size, " rank(s)");
}

}  // namespace tessera::checkpointing
