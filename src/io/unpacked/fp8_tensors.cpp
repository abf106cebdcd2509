#include "io/unpacked/fp8_tensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kScale = "_scale_inv";
// the limit of elements that are held in addition to the requested ones
constexpr std::int64_t kChunk = std::int64_t{1} << 20;

/// Returns the value of each code: a sign, four bits of exponent (bias 7), three of mantissa; both
/// codes whose lower seven bits are set are NaN, and there is no infinity.
std::array<float, 256> e4m3_values() {
  std::array<float, 256> values{};
  for (unsigned code = 0; code < 256; ++code) {
    const auto exponent = static_cast<int>(code >> 3U & 15U);
    const auto mantissa = static_cast<float>(code & 7U);
    const float size =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0F + mantissa, exponent - 10);
    const bool is_nan = (code & 127U) == 127U;
    values.at(code) = is_nan ? std::numeric_limits<float>::quiet_NaN() : code < 128 ? size : -size;
  }
  return values;
}

/// Rounds a finite value to nearest, halves to even.
std::uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U);
}

/// A float32 of at least this value is rounded to infinity.
constexpr float kTooLarge = 0x1.FFp127F;

std::int64_t parts_of(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

}  // namespace

std::optional<Fp8Block> fp8_block(std::string_view config_text, std::string_view where) {
  const nlohmann::json config = parse_json_object(config_text, where);
  const auto record = config.find("quantization_config");
  if (record == config.end() || !record->is_object()) return std::nullopt;
  const auto method = record->find("quant_method");
  if (method == record->end() || *method != "fp8") return std::nullopt;
  const auto size = record->find("weight_block_size");
  const auto is_size = [](const nlohmann::json& n) {
    constexpr std::int64_t kMost = std::int64_t{1} << 20;
    return n.is_number_integer() && n.get<std::int64_t>() >= 1 && n.get<std::int64_t>() <= kMost;
  };
  const bool is_pair = size != record->end() && size->is_array() && size->size() == 2 &&
                       std::ranges::all_of(*size, is_size);
  TESSERA_CHECK(is_pair, ErrorKind::kFormat, where,
                ": quantization_config.weight_block_size: found ",
                size == record->end() ? "none" : json_line(*size),
                ", expected the rows and columns of a block, as [128, 128]");
  return Fp8Block{(*size)[0].get<std::int64_t>(), (*size)[1].get<std::int64_t>()};
}

Fp8Tensors::Fp8Tensors(std::shared_ptr<const TensorSource> packed, Fp8Block block)
    : packed_(std::move(packed)), block_(block), tensors_(packed_->tensors()) {
  for (const auto& [name, tensor] : packed_->tensors()) {
    if (name.ends_with(kScale)) add(name.substr(0, name.size() - kScale.size()), name);
  }
  for (const auto& [name, tensor] : tensors_) {
    TESSERA_CHECK(tensor.dtype != DType::kFloat8E4M3, ErrorKind::kFormat, path().string(),
                  ": found no tensor ", printable(name + std::string(kScale)),
                  ", expected the factors of ", printable(name));
  }
}

void Fp8Tensors::add(const std::string& name, const std::string& scales_name) {
  const std::string where = path().string();
  const SourceTensor* const matrix = packed_->find(name);
  const SourceTensor& scales = *packed_->find(scales_name);
  TESSERA_CHECK(matrix != nullptr, ErrorKind::kFormat, where, ": found ", printable(scales_name),
                " alone, expected the matrix ", printable(name), " that it scales");
  const auto check_dtype = [&](const std::string& which, DType found, DType expected) {
    TESSERA_CHECK(found == expected, ErrorKind::kFormat, where, ": ", printable(which),
                  ": found the dtype ", to_string(found), ", expected ", to_string(expected));
  };
  check_dtype(name, matrix->dtype, DType::kFloat8E4M3);
  check_dtype(scales_name, scales.dtype, DType::kFloat32);
  TESSERA_CHECK(matrix->shape.size() == 2, ErrorKind::kFormat, where, ": ", printable(name),
                ": found the shape ", shape_text(matrix->shape), ", expected a matrix of blocks");
  const std::vector<std::int64_t> expected{parts_of(matrix->shape[0], block_.rows),
                                           parts_of(matrix->shape[1], block_.columns)};
  TESSERA_CHECK(scales.shape == expected, ErrorKind::kFormat, where, ": ", printable(scales_name),
                ": found the shape ", shape_text(scales.shape), ", expected ", shape_text(expected),
                ", a factor for each ", block_.rows, " x ", block_.columns, " elements of ",
                printable(name));
  tensors_.erase(scales_name);
  const DType eight_bits = matrix->dtype;
  tensors_[name] = {DType::kBFloat16, matrix->shape, DType::kBFloat16, /*unpacked=*/true,
                    eight_bits};
  shapes_[name] = {matrix->shape[1], expected[1], expected[0] * expected[1]};
}

const std::vector<float>& Fp8Tensors::factors_of(const std::string& name,
                                                 const Shape& shape) const {
  if (held_name_ == name) return held_;
  held_name_.clear();
  held_.resize(static_cast<std::size_t>(shape.blocks));
  packed_->read(name + std::string(kScale), 0, shape.blocks,
                std::as_writable_bytes(std::span(held_)));
  // No rounding code writes a negative one: the codes have the signs.
  const auto negative = std::ranges::find_if(held_, [](float factor) { return factor < 0; });
  TESSERA_CHECK(negative == held_.end(), ErrorKind::kFormat, path().string(), ": ",
                printable(name + std::string(kScale)), ": found the factor ", *negative,
                " of block ", negative - held_.begin(), ", expected none below 0");
  held_name_ = name;
  return held_;
}

void Fp8Tensors::read(std::string_view name, std::int64_t begin, std::int64_t end,
                      std::span<std::byte> out) const {
  static const std::array<float, 256> values = e4m3_values();
  const auto found = shapes_.find(name);
  if (found == shapes_.end()) return packed_->read(name, begin, end, out);
  const Shape& shape = found->second;
  const std::vector<float>& factors = factors_of(found->first, shape);
  TESSERA_INVARIANT(std::ssize(out) == (end - begin) * 2, "elements of another size");
  std::vector<std::uint8_t> codes;
  for (std::int64_t first = begin; first < end; first += kChunk) {
    const std::int64_t last = std::min(end, first + kChunk);
    codes.resize(static_cast<std::size_t>(last - first));
    packed_->read(name, first, last, std::as_writable_bytes(std::span(codes)));
    for (std::int64_t at = first; at < last; ++at) {
      const std::int64_t row = at / shape.columns, column = at % shape.columns;
      const std::int64_t block = row / block_.rows * shape.blocks_in_row + column / block_.columns;
      const float product = values[codes[static_cast<std::size_t>(at - first)]] *
                            factors[static_cast<std::size_t>(block)];
      TESSERA_CHECK(std::abs(product) < kTooLarge, ErrorKind::kFormat, path().string(), ": ",
                    printable(name), ": found an element in row ", row, ", column ", column,
                    " that is not finite in bfloat16, expected finite ones");
      const std::uint16_t value = to_bfloat16(product);
      std::memcpy(out.data() + (at - begin) * 2, &value, sizeof(value));
    }
  }
}

}  // namespace tessera
