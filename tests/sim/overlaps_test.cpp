// Two operations of any kind on two streams, over drawn views of one storage: a race if and only if
// their bytes meet, one of them writes, and nothing orders them. The report names both: operation,
// stream and rank.
//
// The places of the bytes are counted here one by one, and the order is known from how it was
// drawn. Whole programs of a few operations: random_programs_test.cpp.
#include <ATen/ATen.h>

#include <bitset>
#include <exception>
#include <iterator>
#include <random>
#include <sstream>
#include <thread>

#include "sim/streams.h"
#include "support/test.h"

namespace tessera::sim::overlaps_test {
namespace {

constexpr std::int64_t kBytes = 256;
using Bytes = std::bitset<kBytes>;

struct View {
  at::Tensor tensor;
  Bytes bytes;
  bool repeats = false;  ///< shows a byte twice: nothing writes to such a one
};

/// Counted element by element.
View counted(const at::Tensor& tensor, const at::Tensor& storage) {
  View view{tensor, {}, false};
  const std::int64_t itemsize = tensor.element_size();
  const std::int64_t first = static_cast<const char*>(tensor.const_data_ptr()) -
                             static_cast<const char*>(storage.const_data_ptr());
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    std::int64_t rest = i, element = 0;
    for (std::int64_t d = tensor.dim(); d-- > 0; rest /= tensor.size(d)) {
      element += rest % tensor.size(d) * tensor.stride(d);
    }
    for (std::int64_t byte = 0; byte < itemsize; ++byte) {
      const auto at = static_cast<std::size_t>(first + element * itemsize + byte);
      view.repeats = view.repeats || view.bytes.test(at);
      view.bytes.set(at);
    }
  }
  return view;
}

struct Operation {
  const char* name;  ///< in a report
  bool writes = false;
  bool host_waits = false;  ///< so it orders what its thread launches next
  std::function<void(const at::Tensor&)> run;
  bool on_source = false;  ///< a copy from another device, on that one's stream
};

at::Tensor ones_like_there(const at::Tensor& x) { return at::ones(x.sizes(), x.options()); }
at::Tensor pinned_ones(const at::Tensor& x) {
  return at::ones(x.sizes(), x.options().device(at::kCPU).pinned_memory(true));
}

const std::vector<Operation>& operations() {
  static const auto* const all = new std::vector<Operation>{
      {"fill_", true, false, [](const at::Tensor& x) { x.fill_(3); }},
      {"zero_", true, false, [](const at::Tensor& x) { x.zero_(); }},
      {"add", true, false, [](const at::Tensor& x) { x.add_(1); }},
      {"addcmul", true, false,
       [](const at::Tensor& x) {
         const at::Tensor one = ones_like_there(x);
         x.addcmul_(one, one);
       }},
      {"copy_", true, false, [](const at::Tensor& x) { x.copy_(ones_like_there(x)); }},
      {"copy_", true, false,
       [](const at::Tensor& x) { x.copy_(at::ones(x.sizes(), x.options().device(device(1)))); },
       /*on_source=*/true},
      {"upload", true, true, [](const at::Tensor& x) { x.copy_(pinned_ones(x).mul(2)); }},
      {"upload", true, false, [](const at::Tensor& x) { x.copy_(pinned_ones(x), true); }},
      {"masked_fill_", true, false,
       [](const at::Tensor& x) { x.masked_fill_(at::ones(x.sizes(), on(0, at::kBool)), 1); }},
      {"_foreach_add_", true, false,
       [](const at::Tensor& x) { at::_foreach_add_({ones_like_there(x), x}, 1); }},
      {"mul.out", true, false,
       [](const at::Tensor& x) {
         at::Tensor out = x;
         at::mul_out(out, ones_like_there(x), ones_like_there(x));
       }},
      {"_index_put_impl_", true, false,
       [](const at::Tensor& x) {
         const at::Tensor first = at::zeros({1}, on(0, at::kLong));
         x.unsqueeze(0).index_put_({first}, ones_like_there(x).unsqueeze(0));
       }},
      {"sum", false, false, [](const at::Tensor& x) { x.sum(); }},
      {"copy_", false, false, [](const at::Tensor& x) { x.clone(); }},
      {"add", false, false, [](const at::Tensor& x) { x.add(1); }},
      {"copy_", false, false, [](const at::Tensor& x) { x.to(device(1)); }},
      {"cat", false, false, [](const at::Tensor& x) { at::cat({x.unsqueeze(0), x.unsqueeze(0)}); }},
      {"read", false, true, [](const at::Tensor& x) { x.cpu(); }},
      {"read", false, false,
       [](const at::Tensor& x) { pinned_ones(x).copy_(x, /*non_blocking=*/true); }},
      {"_foreach_abs", false, false, [](const at::Tensor& x) { at::_foreach_abs({x}); }},
  };
  return *all;
}

/// The operations between the two, in the host's order.
enum class Between {
  kNothing,
  kEvent,
  kTwoEvents,      ///< over a third stream
  kHostWaits,      ///< for the stream, on the second operation's thread
  kHostAsks,       ///< for an event
  kEventOfBefore,  ///< recorded before the first operation
  kEventOfOther,   ///< recorded on a third stream
};
constexpr Between kBetween[] = {
    Between::kNothing,  Between::kNothing,       Between::kNothing,
    Between::kEvent,    Between::kTwoEvents,     Between::kHostWaits,
    Between::kHostAsks, Between::kEventOfBefore, Between::kEventOfOther};

bool orders(Between between) {
  return between == Between::kEvent || between == Between::kTwoEvents ||
         between == Between::kHostWaits || between == Between::kHostAsks;
}

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  std::int64_t below(std::int64_t end) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(end));
  }
  template <class All>
  const auto& one_of(const All& all) {
    return all[static_cast<std::size_t>(below(static_cast<std::int64_t>(std::size(all))))];
  }

  /// Draws a view of up to three dims with any strides, also 0, in any dtype; mostly of few
  /// elements.
  View view(const at::Tensor& storage) {
    constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kDouble, at::kLong,
                                          at::kByte};
    const at::Tensor typed = storage.view(one_of(kDtypes));
    std::vector<std::int64_t> sizes, strides;
    std::int64_t last = 0;
    for (std::int64_t dims = below(4); dims > 0; --dims) {
      sizes.push_back(1 + below(5));
      strides.push_back(below(9));
      last += (sizes.back() - 1) * strides.back();
    }
    if (last >= typed.numel()) return view(storage);
    return counted(typed.as_strided(sizes, strides, below(typed.numel() - last)), storage);
  }

 private:
  std::mt19937_64 random_;
};

struct Case {
  const Operation* first = nullptr;
  const Operation* second = nullptr;
  View one, other;
  Between between = Between::kNothing;
  bool other_thread = false;  ///< launches the second one
};

Case drawn_case(std::uint64_t seed, const at::Tensor& storage) {
  Draw draw(seed);
  Case c;
  c.first = &draw.one_of(operations());
  c.second = &draw.one_of(operations());
  do {
    c.one = draw.view(storage);
  } while (c.first->writes && c.one.repeats);
  do {
    c.other = draw.view(storage);
  } while (c.second->writes && c.other.repeats);
  c.between = draw.one_of(kBetween);
  c.other_thread = draw.below(3) == 0;
  return c;
}

bool races(const Case& c) {
  if (!c.first->writes && !c.second->writes) return false;
  const bool is_ordered = orders(c.between) || (c.first->host_waits && !c.other_thread);
  return !is_ordered && (c.one.bytes & c.other.bytes).any();
}

std::string text(const Case& c) {
  std::ostringstream out;
  const auto shown = [&](const Operation& operation, const View& view) {
    out << operation.name << " of " << view.tensor.scalar_type() << " " << view.tensor.sizes()
        << " strides " << view.tensor.strides() << " from " << view.tensor.storage_offset();
  };
  shown(*c.first, c.one);
  out << ", then ";
  shown(*c.second, c.other);
  out << ", between them " << static_cast<int>(c.between)
      << (c.other_thread ? ", on another thread" : "");
  return out.str();
}

struct Streams {
  c10::Stream first = new_stream(0), second = new_stream(0), third = new_stream(0);
  c10::Stream first_source = new_stream(1), second_source = new_stream(1);
};

void run(const Operation& operation, const View& view, const c10::Stream& on,
         const c10::Stream& source) {
  const c10::StreamGuard there(source), here(on);
  operation.run(view.tensor);
}

void order(const Streams& on, Between between, const c10::Event& before) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  switch (between) {
    case Between::kNothing:
      break;
    case Between::kEvent:
      wait_for(on.second, on.first);
      break;
    case Between::kTwoEvents:
      wait_for(on.third, on.first);
      wait_for(on.second, on.third);
      break;
    case Between::kHostWaits:
      guard().synchronizeStream(on.first);
      break;
    case Between::kHostAsks:
      event.record(on.first);
      EXPECT_TRUE(event.query());
      break;
    case Between::kEventOfBefore:
      before.block(on.second);
      break;
    case Between::kEventOfOther:
      wait_for(on.second, on.third);
      break;
  }
}

std::string race_in(const Case& c, const Streams& on) {
  c10::Event before(c10::DeviceType::PrivateUse1);
  before.record(on.first);
  return race_of([&] {
    {
      const RankScope rank(0);
      run(*c.first, c.one, on.first, on.first_source);
    }
    std::exception_ptr failure;
    const auto second = [&] {
      try {
        const RankScope rank(1);
        order(on, c.between, before);
        run(*c.second, c.other, on.second, on.second_source);
      } catch (...) {
        failure = std::current_exception();
      }
    };
    if (c.other_thread) {
      std::thread(second).join();
    } else {
      second();
    }
    if (failure) std::rethrow_exception(failure);
  });
}

TEST(Overlaps, RaceWhereBytesMeetAndNothingOrdersThemAndNowhereElse) {
  constexpr std::uint64_t kCases = 4000;
  const at::Tensor storage = at::zeros({kBytes}, on(0, at::kByte));
  const Streams on;
  std::uint64_t racing = 0, apart = 0;
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    settle();
    const Case c = drawn_case(seed, storage);
    const std::string race = race_in(c, on);
    ASSERT_EQ(!race.empty(), races(c)) << "case " << seed << ": " << text(c) << "\n" << race;
    const auto stream = [](const Operation& operation, const c10::Stream& here,
                           const c10::Stream& source) {
      const c10::Stream& of = operation.on_source ? source : here;
      return "on sim:" + std::to_string(of.device_index()) + " stream " + std::to_string(of.id());
    };
    if (race.empty()) {
      if (!orders(c.between) && (c.one.bytes & c.other.bytes).none()) ++apart;
      continue;
    }
    ++racing;
    EXPECT_THAT(race, Says(c.first->name, c.second->name,
                           stream(*c.first, on.first, on.first_source) + " of rank 0",
                           stream(*c.second, on.second, on.second_source) + " of rank 1"))
        << text(c);
  }
  EXPECT_GT(racing, kCases / 20) << "what is drawn is too tame";
  EXPECT_GT(apart, kCases / 10) << "views that lie in turns are too few";
}

}  // namespace
}  // namespace tessera::sim::overlaps_test
