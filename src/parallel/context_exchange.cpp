#include "parallel/context_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "base/first_derivative.h"
#include "base/test_hooks.h"
#include "comm/host_read.h"
#include "grad/region.h"
#include "parallel/collectives.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::parallel {
namespace {

using layout::ContextCut;
using layout::Range;

/// Part of dim 1 of what a rank holds: [A, n, C].
struct Place {
  Range whole;             ///< in a row
  std::int64_t local = 0;  ///< where it begins among the holder's own positions
};

/// Calls visit(Place) for the common positions of a range and each run of `rank`: neighbouring
/// parts travel and are added together.
template <class Visit>
void visit_common(const ContextCut& cut, int rank, const Range& range, const Visit& visit) {
  std::int64_t before = 0;
  for (const Range& run : cut.runs_of(rank)) {
    const Range common = layout::intersect(run, range);
    if (!common.empty()) visit(Place{common, before + common.begin - run.begin});
    before += run.size();
  }
}

/// The keys that any part of the rank reaches: ranges without common elements, ascending.
std::vector<Range> reached_by(const ContextExchange& exchange, int rank) {
  std::vector<Range> all;
  for (const int part : exchange.cut.parts_of(rank)) {
    all.push_back(exchange.reach[static_cast<std::size_t>(part)]);
  }
  std::ranges::sort(all, {}, &Range::begin);
  std::vector<Range> joined;
  for (const Range& one : all) {
    if (one.empty()) continue;
    if (!joined.empty() && one.begin <= joined.back().end) {
      joined.back().end = std::max(joined.back().end, one.end);
    } else {
      joined.push_back(one);
    }
  }
  return joined;
}

/// Calls visit(Place) for the positions of `from` that `to` reaches.
template <class Visit>
void visit_gathered(const ContextExchange& exchange, int from, int to, const Visit& visit) {
  for (const Range& range : reached_by(exchange, to)) {
    visit_common(exchange.cut, from, range, visit);
  }
}

/// Elements of [A, ., C] that one position has, summed over tensors.
std::int64_t elements_of_position(const std::vector<at::Tensor>& tensors) {
  std::int64_t sum = 0;
  for (const at::Tensor& one : tensors) sum += one.size(0) * one.size(2);
  return sum;
}

/// Writes and reads the blocks of one message, one after the other.
class Cursor {
 public:
  Cursor(at::Tensor elements, std::int64_t at) : elements_(std::move(elements)), at_(at) {}
  void write(const at::Tensor& block) { next(block.sizes()).copy_(block); }
  at::Tensor next(at::IntArrayRef sizes) {
    std::int64_t count = 1;
    for (const std::int64_t size : sizes) count *= size;
    const at::Tensor view = elements_.narrow(0, at_, count).view(sizes);
    at_ += count;
    return view;
  }

 private:
  at::Tensor elements_;
  std::int64_t at_;
};

std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t size : sizes) offsets.push_back(offsets.back() + size);
  return offsets;
}

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

/// Sizes of messages to and from all ranks, none to itself; size(from, to).
template <class Size>
Splits splits_of(const Axis& axis, const Size& size) {
  Splits splits;
  for (int rank = 0; rank < axis.size; ++rank) {
    splits.sends.push_back(rank == axis.rank ? 0 : size(axis.rank, rank));
    splits.receives.push_back(rank == axis.rank ? 0 : size(rank, axis.rank));
  }
  return splits;
}

void seen_by_tests(const ContextSite& site, std::vector<at::Tensor>& tensors) {
  if (const auto* hook = test_hooks::context_exchange.get()) (*hook)(site, tensors);
}

}  // namespace

at::Tensor places_on(const std::vector<std::int64_t>& places, at::Device device) {
  const at::Tensor host = at::empty({std::ssize(places)}, at::TensorOptions(at::kLong));
  std::copy(places.begin(), places.end(), host.mutable_data_ptr<std::int64_t>());
  return comm::uploaded(host, device);
}

std::vector<at::Tensor> gather_reached(const std::vector<at::Tensor>& own,
                                       const ContextExchange& exchange, Direction direction) {
  const Axis& axis = exchange.axis;
  if (axis.alone()) return own;
  const std::int64_t of_position = elements_of_position(own);
  const Splits splits = splits_of(axis, [&](int from, int to) {
    std::int64_t positions = 0;
    visit_gathered(exchange, from, to,
                   [&](const Place& place) { positions += place.whole.size(); });
    return positions * of_position;
  });
  const auto sends = offsets_of(splits.sends), receives = offsets_of(splits.receives);
  at::Tensor sent = at::empty({sends.back()}, own[0].options());
  for (int to = 0; to < axis.size; ++to) {
    if (to == axis.rank) continue;
    Cursor message(sent, sends[index(to)]);
    visit_gathered(exchange, axis.rank, to, [&](const Place& place) {
      for (const at::Tensor& one : own) {
        message.write(one.narrow(1, place.local, place.whole.size()));
      }
    });
  }
  const at::Tensor arrived =
      exchange_rows(std::exchange(sent, {}), axis, splits, exchange.where, direction);
  std::vector<at::Tensor> whole;
  for (const at::Tensor& one : own) {
    whole.push_back(at::zeros({one.size(0), exchange.cut.positions, one.size(2)}, one.options()));
  }
  for (int from = 0; from < axis.size; ++from) {
    Cursor message(arrived, receives[index(from)]);
    visit_gathered(exchange, from, axis.rank, [&](const Place& place) {
      for (std::size_t i = 0; i < own.size(); ++i) {
        const at::Tensor here = whole[i].narrow(1, place.whole.begin, place.whole.size());
        here.copy_(from == axis.rank ? own[i].narrow(1, place.local, place.whole.size())
                                     : message.next(here.sizes()));
      }
    });
  }
  seen_by_tests({ContextSite::Kind::kGathered, axis, exchange.cut}, whole);
  return whole;
}

template <class Visit>
void PartSums::blocks(int from, int to, const Visit& visit) const {
  for (const int part : exchange_.cut.parts_of(from)) {
    visit_common(exchange_.cut, to, exchange_.reach[static_cast<std::size_t>(part)],
                 [&](const Place& place) { visit(part, place); });
  }
}

std::int64_t PartSums::elements(int from, int to) const {
  std::int64_t positions = 0;
  blocks(from, to, [&](int /*part*/, const Place& place) { positions += place.whole.size(); });
  return positions * elements_of_position(sums_);
}

PartSums::PartSums(const ContextExchange& exchange, const std::vector<at::Tensor>& like,
                   at::ScalarType dtype)
    : exchange_(exchange) {
  for (const at::Tensor& one : like) {
    sums_.push_back(at::zeros(one.sizes(), one.options().dtype(dtype)));
  }
  const Axis& axis = exchange_.axis;
  if (axis.alone()) return;
  std::vector<std::int64_t> sizes;
  for (int to = 0; to < axis.size; ++to) {
    sizes.push_back(to == axis.rank ? 0 : elements(axis.rank, to));
  }
  filled_ = offsets_of(sizes);
  sent_ = at::empty({filled_.back()}, sums_[0].options());
  filled_.pop_back();
}

void PartSums::add(int part, std::vector<at::Tensor> addends) {
  const Axis& axis = exchange_.axis;
  seen_by_tests({ContextSite::Kind::kAddends, axis, exchange_.cut, part}, addends);
  const Range& reach = exchange_.reach[static_cast<std::size_t>(part)];
  for (int to = 0; to < axis.size; ++to) {
    visit_common(exchange_.cut, to, reach, [&](const Place& place) {
      std::vector<at::Tensor> kept;
      for (std::size_t i = 0; i < addends.size(); ++i) {
        const at::Tensor block =
            addends[i].narrow(1, place.whole.begin - reach.begin, place.whole.size());
        if (axis.alone()) {
          sums_[i].narrow(1, place.local, place.whole.size()).add_(block);
        } else if (to == axis.rank) {
          kept.push_back(block.clone());
        } else {
          Cursor message(sent_, filled_[index(to)]);
          message.write(block);
          filled_[index(to)] += block.numel();
        }
      }
      if (!kept.empty()) own_.push_back(std::move(kept));
    });
  }
}

std::vector<at::Tensor> PartSums::finish(Direction direction) {
  const Axis& axis = exchange_.axis;
  if (axis.alone()) return std::move(sums_);
  const Splits splits = splits_of(axis, [&](int from, int to) { return elements(from, to); });
  const at::Tensor arrived =
      exchange_rows(std::exchange(sent_, {}), axis, splits, exchange_.where, direction);
  std::vector<Cursor> messages;
  for (const std::int64_t offset : offsets_of(splits.receives))
    messages.emplace_back(arrived, offset);
  auto kept = own_.begin();
  for (int part = 0; part < exchange_.cut.parts(); ++part) {
    const int from = exchange_.cut.owner[static_cast<std::size_t>(part)];
    visit_common(
        exchange_.cut, axis.rank, exchange_.reach[static_cast<std::size_t>(part)],
        [&](const Place& place) {
          for (std::size_t i = 0; i < sums_.size(); ++i) {
            const at::Tensor here = sums_[i].narrow(1, place.local, place.whole.size());
            here.add_(from == axis.rank ? (*kept)[i] : messages[index(from)].next(here.sizes()));
          }
          if (from == axis.rank) ++kept;
        });
  }
  own_.clear();
  seen_by_tests({ContextSite::Kind::kSums, axis, exchange_.cut}, sums_);
  return std::move(sums_);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct GatherCall : torch::CustomClassHolder {
  explicit GatherCall(ContextExchange of_rows) : exchange(std::move(of_rows)) {}
  const ContextExchange exchange;
};

struct GatherPlacesFunction : torch::autograd::Function<GatherPlacesFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& own,
                            const c10::intrusive_ptr<GatherCall>& call) {
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return gather_reached({own}, call->exchange).front();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    const auto held = ctx->saved_data["call"].toCapsule();
    const ContextExchange& exchange = dynamic_cast<const GatherCall*>(held.get())->exchange;
    const WideScope addends;
    const at::ScalarType wide = at::promote_types(grads[0].scalar_type(), at::kFloat);
    const at::Tensor like = grads[0].narrow(1, 0, exchange.cut.positions_of_rank());
    PartSums sums(exchange, {like}, wide);
    const int first = exchange.cut.parts_of(exchange.axis.rank).front();
    const Range& reach = exchange.reach[static_cast<std::size_t>(first)];
    sums.add(first, {grads[0].narrow(1, reach.begin, reach.size())});
    return {sums.finish().front().to(grads[0].scalar_type()), at::Tensor()};
  }
};

}  // namespace

at::Tensor gather_places(const at::Tensor& own, const ContextExchange& exchange) {
  grad::refuse_recording("rows gathered over ranks of a context region");
  return GatherPlacesFunction::apply(own, c10::make_intrusive<GatherCall>(exchange));
}

namespace {

/// Elements of a message of [A, G / ranks, n, C] of each tensor.
std::int64_t elements_of_heads(const std::vector<at::Tensor>& tensors, std::int64_t heads,
                               std::int64_t positions) {
  std::int64_t sum = 0;
  for (const at::Tensor& one : tensors) sum += one.size(0) * heads * positions * one.size(3);
  return sum;
}

/// Calls visit(view of a rank's positions) for each run of them in x [A, G, T, C].
template <class Visit>
void visit_runs(const at::Tensor& x, const ContextCut& cut, int rank, const Visit& visit) {
  for (const Range& run : cut.runs_of(rank)) visit(x.narrow(2, run.begin, run.size()));
}

at::Tensor like_with(const at::Tensor& x, std::int64_t heads, std::int64_t positions) {
  return at::empty({x.size(0), heads, positions, x.size(3)}, x.options());
}

/// Every rank sends and gets the same number of elements.
at::Tensor moved(const at::Tensor& elements, const Axis& axis, const std::string& where,
                 Direction direction) {
  const std::vector<std::int64_t> each(static_cast<std::size_t>(axis.size),
                                       elements.numel() / axis.size);
  return exchange_rows(elements, axis, {each, each}, where, direction);
}

}  // namespace

std::vector<at::Tensor> to_heads(const std::vector<at::Tensor>& own, const Axis& axis,
                                 const ContextCut& cut, const std::string& where,
                                 Direction direction) {
  if (axis.alone()) return own;
  const std::int64_t heads = own[0].size(1) / axis.size;
  const std::int64_t positions = cut.positions_of_rank();
  const at::Tensor sent =
      at::empty({elements_of_heads(own, heads, positions) * axis.size}, own[0].options());
  Cursor out(sent, 0);
  for (int to = 0; to < axis.size; ++to) {
    for (const at::Tensor& one : own) out.write(one.narrow(1, to * heads, heads));
  }
  Cursor in(moved(sent, axis, where, direction), 0);
  std::vector<at::Tensor> whole;
  for (const at::Tensor& one : own) whole.push_back(like_with(one, heads, cut.positions));
  for (int from = 0; from < axis.size; ++from) {
    for (const at::Tensor& one : whole) {
      const at::Tensor block = in.next({one.size(0), heads, positions, one.size(3)});
      std::int64_t begin = 0;
      visit_runs(one, cut, from, [&](const at::Tensor& run) {
        run.copy_(block.narrow(2, begin, run.size(2)));
        begin += run.size(2);
      });
    }
  }
  seen_by_tests({ContextSite::Kind::kHeads, axis, cut}, whole);
  return whole;
}

std::vector<at::Tensor> to_positions(const std::vector<at::Tensor>& own, const Axis& axis,
                                     const ContextCut& cut, const std::string& where,
                                     Direction direction) {
  if (axis.alone()) return own;
  const std::int64_t heads = own[0].size(1);
  const std::int64_t positions = cut.positions_of_rank();
  const at::Tensor sent =
      at::empty({elements_of_heads(own, heads, positions) * axis.size}, own[0].options());
  Cursor out(sent, 0);
  for (int to = 0; to < axis.size; ++to) {
    for (const at::Tensor& one : own) {
      const at::Tensor block = out.next({one.size(0), heads, positions, one.size(3)});
      std::int64_t begin = 0;
      visit_runs(one, cut, to, [&](const at::Tensor& run) {
        block.narrow(2, begin, run.size(2)).copy_(run);
        begin += run.size(2);
      });
    }
  }
  Cursor in(moved(sent, axis, where, direction), 0);
  std::vector<at::Tensor> local;
  for (const at::Tensor& one : own) local.push_back(like_with(one, heads * axis.size, positions));
  for (int from = 0; from < axis.size; ++from) {
    for (const at::Tensor& one : local) {
      const at::Tensor here = one.narrow(1, from * heads, heads);
      here.copy_(in.next(here.sizes()));
    }
  }
  return local;
}

}  // namespace tessera::parallel
