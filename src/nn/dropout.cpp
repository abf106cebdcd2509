// Draws the elements that dropout of an adapter's input leaves out: the same numbers on the host
// and on a device, there by integer operations on whole tensors, since those of a large model take
// the host minutes a step.

#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/hash.h"
#include "base/philox.h"
#include "base/random.h"
#include "base/test_hooks.h"
#include "base/threads/parallel.h"
#include "grad/region.h"
#include "nn/linear.h"
#include "parallel/context_exchange.h"
#include "tessera/error.h"

namespace tessera::nn {
namespace {

/// The counter's last word says what is drawn, as in base/random.cpp.
constexpr std::uint32_t kDropoutPurpose = 4;
constexpr std::int64_t kRowsOfAThread = 16;

/// Words below this are dropped.
double dropout_limit(const DropoutDraw& draw) { return std::ldexp(draw.probability, 32); }

PhiloxKey key_of_draw(const DropoutDraw& draw) {
  return {static_cast<std::uint32_t>(draw.stream), static_cast<std::uint32_t>(draw.stream >> 32)};
}

/// One row of one position: a block of the generator is four columns of the whole input.
template <class T>
void fill_factors(T* out, std::int64_t columns, std::int64_t row, std::int64_t position,
                  const DropoutDraw& draw) {
  const PhiloxKey key = key_of_draw(draw);
  const double limit = dropout_limit(draw);
  const T kept = static_cast<T>(1.0 / (1.0 - draw.probability));
  const std::int64_t end = draw.first_column + columns;
  for (std::int64_t column = draw.first_column; column < end;) {
    const PhiloxCounter words =
        philox({static_cast<std::uint32_t>(column / 4), static_cast<std::uint32_t>(position),
                static_cast<std::uint32_t>(row), kDropoutPurpose},
               key);
    const std::int64_t next = std::min(end, (column / 4 + 1) * 4);
    for (; column < next; ++column) {
      const bool drops = static_cast<double>(words[static_cast<std::size_t>(column % 4)]) < limit;
      out[column - draw.first_column] = drops ? T{0} : kept;
    }
  }
}

template <class T>
void fill_all(const at::Tensor& factors, const DropoutDraw& draw) {
  const std::int64_t positions = factors.size(1);
  const std::int64_t columns = factors.size(2);
  T* const out = factors.mutable_data_ptr<T>();
  base::for_ranges(
      factors.size(0) * positions, kRowsOfAThread, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t position = i % positions;
          fill_factors(out + i * columns, columns, draw.first_row + i / positions,
                       draw.places ? (*draw.places)[static_cast<std::size_t>(position)] : position,
                       draw);
        }
      });
}

/// Words lie in int64, each tensor of them with one of four elements: up to ten of them, 160 MiB.
constexpr std::int64_t kDrawnAtATime = std::int64_t{1} << 23;
constexpr std::int64_t kWordMask = 0xFFFFFFFF;
constexpr std::int64_t kWordsOfACounter = 4;

using PhiloxWords = std::array<at::Tensor, kWordsOfACounter>;

struct ProductOfWords {
  at::Tensor high, low;
};

/// Multiplies words by a constant: int64 wraps around, which keeps all 64 bits.
ProductOfWords product_of(const at::Tensor& words, std::uint32_t factor) {
  const at::Tensor product = words * static_cast<std::int64_t>(factor);
  return {product.bitwise_right_shift(32).bitwise_and_(kWordMask), product.bitwise_and(kWordMask)};
}

at::Tensor mixed_with_key(const at::Tensor& high, const at::Tensor& word, std::uint32_t key) {
  return at::bitwise_xor(high, word).bitwise_xor_(static_cast<std::int64_t>(key));
}

/// philox() of each counter; the words may be of any shapes that broadcast.
PhiloxWords philox_on_device(PhiloxWords counter, PhiloxKey key) {
  using Constants = PhiloxConstants;
  for (int round = 0; round < Constants::kRounds; ++round) {
    const ProductOfWords first = product_of(counter[0], Constants::kFactors[0]);
    const ProductOfWords second = product_of(counter[2], Constants::kFactors[1]);
    counter = {mixed_with_key(second.high, counter[1], key[0]), second.low,
               mixed_with_key(first.high, counter[3], key[1]), first.low};
    for (std::size_t i = 0; i < key.size(); ++i) key[i] += Constants::kKeySteps[i];
  }
  return counter;
}

/// Whether each element of [B, T, K] is dropped: bool on `device`.
at::Tensor dropped_on_device(const DropoutDraw& draw, at::IntArrayRef shape, at::Device device) {
  const auto numbers = at::TensorOptions(at::kLong).device(device);
  at::Tensor result = at::empty(shape, numbers.dtype(at::kBool));
  if (result.numel() == 0) return result;
  const std::int64_t positions = shape[1], columns = shape[2], rows = shape[0] * positions;
  const auto of_test = test_hooks::elements_at_a_time.get();
  const std::int64_t most = of_test ? (*of_test)() : kDrawnAtATime;
  const std::int64_t step = std::max<std::int64_t>(1, most / columns);
  const auto bound = static_cast<std::int64_t>(std::ceil(dropout_limit(draw)));
  const std::int64_t end = draw.first_column + columns;
  const at::Tensor block =
      at::arange(draw.first_column / kWordsOfACounter, (end - 1) / kWordsOfACounter + 1, numbers)
          .unsqueeze(0);
  const at::Tensor purpose = at::full({1, 1}, std::int64_t{kDropoutPurpose}, numbers);
  const at::Tensor places = draw.places ? parallel::places_on(*draw.places, device) : at::Tensor();
  for (std::int64_t begin = 0; begin < rows; begin += step) {
    const std::int64_t count = std::min(step, rows - begin);
    const at::Tensor place = at::arange(begin, begin + count, numbers).unsqueeze(1);
    const at::Tensor row = place.floor_divide(positions) + draw.first_row;
    at::Tensor position = place.remainder(positions);
    if (places.defined()) position = places.index_select(0, position.squeeze(1)).unsqueeze(1);
    const PhiloxWords words = philox_on_device({block, position, row, purpose}, key_of_draw(draw));
    std::vector<at::Tensor> dropped;
    for (const at::Tensor& each : words) dropped.push_back(each.lt(bound));
    result.view({rows, columns})
        .narrow(0, begin, count)
        .copy_(at::stack(dropped, 2)
                   .flatten(1, 2)
                   .narrow(1, draw.first_column % kWordsOfACounter, columns));
  }
  return result;
}

}  // namespace

DropoutDraw dropout_draw(const LoraOptions& options, const SamplePlace& place) {
  Hasher stream;
  stream.add(place.seed).add(place.step).add(options.layer);
  return {options.dropout, stream.digest(), place.first_row, options.first_column, place.places};
}

at::Tensor dropout_factors(const DropoutDraw& draw, const std::vector<std::int64_t>& shape,
                           at::ScalarType dtype, at::Device device) {
  TESSERA_INVARIANT(shape.size() == 3, "dropout of an adapter's input with ", shape.size(),
                    " dims, expected rows, positions and columns");
  TESSERA_INVARIANT(!draw.places || std::ssize(*draw.places) == shape[1], "dropout of ", shape[1],
                    " positions at the places of ", draw.places ? draw.places->size() : 0);
  grad::refuse_recording("what dropout drops in one step");
  const at::ScalarType drawn = dtype == at::kDouble ? dtype : at::kFloat;
  if (!device.is_cpu()) {
    return dropped_on_device(draw, shape, device)
        .logical_not_()
        .to(drawn)
        .mul_(1.0 / (1.0 - draw.probability))
        .to(dtype);
  }
  const at::Tensor factors = at::empty(shape, at::TensorOptions().dtype(drawn));
  drawn == at::kDouble ? fill_all<double>(factors, draw) : fill_all<float>(factors, draw);
  return factors.to(dtype);
}

}  // namespace tessera::nn
