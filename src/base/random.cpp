#include "base/random.h"

#include <cmath>
#include <numbers>
#include <utility>

#include "base/hash.h"
#include "base/pass_local.h"
#include "base/philox.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr int kFeistelRounds = 8;
constexpr int kMinHalfBits = 4;

/// The last counter word: the kind of numbers, so that two uses of one stream do not share bits.
enum class Purpose : std::uint32_t { kNormal = 1, kUniform = 2, kPermutation = 3 };

PhiloxKey key_of_stream(std::uint64_t stream) {
  return {static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)};
}

PhiloxCounter block(std::int64_t index, Purpose purpose, PhiloxKey key) {
  const auto bits = static_cast<std::uint64_t>(index);
  return philox({static_cast<std::uint32_t>(bits), static_cast<std::uint32_t>(bits >> 32), 0,
                 static_cast<std::uint32_t>(purpose)},
                key);
}

std::array<double, 4> normals(std::int64_t index, PhiloxKey key) {
  const PhiloxCounter words = block(index, Purpose::kNormal, key);
  std::array<double, 4> result;
  for (std::size_t pair = 0; pair < 4; pair += 2) {
    // The half keeps the logarithm's argument above zero and the pair symmetric.
    const double u = (words[pair] + 0.5) * 0x1p-32;
    const double angle = 2.0 * std::numbers::pi * ((words[pair + 1] + 0.5) * 0x1p-32);
    const double radius = std::sqrt(-2.0 * std::log(u));
    result[pair] = radius * std::cos(angle);
    result[pair + 1] = radius * std::sin(angle);
  }
  return result;
}

std::array<double, 4> uniforms(std::int64_t index, PhiloxKey key) {
  const PhiloxCounter words = block(index, Purpose::kUniform, key);
  std::array<double, 4> result;
  for (std::size_t lane = 0; lane < 4; ++lane) result[lane] = words[lane] * 0x1p-32;
  return result;
}

/// Element i is lane i % 4 of block i / 4, for any requested range.
template <class Draw, class Finish>
void fill(float* out, std::int64_t begin, std::int64_t end, const Draw& draw,
          const Finish& finish) {
  TESSERA_INVARIANT(0 <= begin && begin <= end, "random range [", begin, ", ", end, ")");
  for (std::int64_t element = begin; element < end;) {
    const std::array<double, 4> lanes = draw(element / 4);
    for (std::int64_t lane = element % 4; lane < 4 && element < end; ++lane, ++element) {
      out[element - begin] = finish(lanes[static_cast<std::size_t>(lane)]);
    }
  }
}

}  // namespace

PhiloxCounter philox(PhiloxCounter counter, PhiloxKey key) {
  using Constants = PhiloxConstants;
  for (int round = 0; round < Constants::kRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{Constants::kFactors[0]} * counter[0];
    const std::uint64_t product1 = std::uint64_t{Constants::kFactors[1]} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(product0)};
    for (std::size_t i = 0; i < key.size(); ++i) key[i] += Constants::kKeySteps[i];
  }
  return counter;
}

std::uint64_t stream_of(std::uint64_t seed, std::string_view name) {
  return Hasher().add(seed).add(name).digest();
}

void fill_normal(float* out, std::int64_t begin, std::int64_t end, std::uint64_t seed,
                 std::string_view name, float mean, float std) {
  const PhiloxKey key = key_of_stream(stream_of(seed, name));
  fill(
      out, begin, end, [&](std::int64_t index) { return normals(index, key); },
      [&](double z) { return static_cast<float>(double{mean} + double{std} * z); });
}

void fill_uniform(float* out, std::int64_t begin, std::int64_t end, std::uint64_t seed,
                  std::string_view name, float low, float high) {
  const PhiloxKey key = key_of_stream(stream_of(seed, name));
  fill(
      out, begin, end, [&](std::int64_t index) { return uniforms(index, key); },
      [&](double u) {
        const auto value = static_cast<float>(double{low} + (double{high} - double{low}) * u);
        return value < high ? value : std::nextafter(high, low);  // rounding may reach `high`
      });
}

Permutation::Permutation(std::uint64_t seed, std::uint64_t epoch, std::int64_t size)
    : key_(key_of_stream(stream_of(seed, "permutation"))),
      epoch_(epoch),
      size_(size),
      half_bits_(kMinHalfBits) {
  TESSERA_INVARIANT(0 <= size && size <= (std::int64_t{1} << 62), "permutation of ", size);
  while ((std::int64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
}

std::uint64_t Permutation::encrypt(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & mask;
  for (std::uint32_t round = 0; round < kFeistelRounds; ++round) {
    // The epoch takes two words; round and purpose share the last.
    const PhiloxCounter words =
        philox({static_cast<std::uint32_t>(right), static_cast<std::uint32_t>(epoch_),
                static_cast<std::uint32_t>(epoch_ >> 32),
                static_cast<std::uint32_t>(Purpose::kPermutation) | (round << 8)},
               key_);
    const std::uint64_t next = left ^ (words[0] & mask);
    left = right;
    right = next;
  }
  return (left << half_bits_) | right;
}

std::int64_t Permutation::operator()(std::int64_t index) const {
  TESSERA_INVARIANT(0 <= index && index < size_, "index ", index, " of a permutation of ", size_);
  if (size_ == 1) return 0;
  auto value = static_cast<std::uint64_t>(index);
  do {
    value = encrypt(value);
  } while (value >= static_cast<std::uint64_t>(size_));
  return static_cast<std::int64_t>(value);
}

namespace {

using PlaceHere = base::PassLocal<base::PassValue::kSamplePlace, const std::optional<SamplePlace>*>;

}  // namespace

std::optional<SamplePlace> sample_place() {
  const auto* const place = PlaceHere::here();
  return place != nullptr ? *place : std::nullopt;
}

SampleScope::SampleScope(std::optional<SamplePlace> place)
    : place_(std::move(place)), outer_(std::exchange(PlaceHere::here(), &place_)) {}

SampleScope::~SampleScope() { PlaceHere::here() = outer_; }

}  // namespace tessera
