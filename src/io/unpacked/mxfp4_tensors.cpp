#include "io/unpacked/mxfp4_tensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kBlocks = "_blocks";
constexpr std::string_view kScales = "_scales";
constexpr std::int64_t kPackedBytes = 16;
constexpr std::int64_t kBlockValues = 32;
constexpr int kExponentBias = 127;
constexpr std::uint8_t kScaleOfNan = 255;
constexpr std::array<float, 8> kE2m1{0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};

/// The value of each four-bit code under each scale. Exact, except for values that are too large.
struct Values {
  std::array<std::array<std::uint16_t, 16>, 256> bits{};
  Values() {
    for (int scale = 0; scale < 256; ++scale) {
      for (std::size_t code = 0; code < 16; ++code) {
        const float size = std::ldexp(kE2m1.at(code % 8), scale - kExponentBias);
        const float value = code < 8 ? size : -size;
        bits.at(static_cast<std::size_t>(scale)).at(code) =
            static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
      }
    }
  }
};

bool is_finite(std::uint16_t bfloat16) { return (bfloat16 & 0x7F80U) != 0x7F80U; }

}  // namespace

bool says_mxfp4(std::string_view config_text, std::string_view where) {
  const nlohmann::json config = parse_json_object(config_text, where);
  const auto record = config.find("quantization_config");
  if (record == config.end() || !record->is_object()) return false;
  const auto method = record->find("quant_method");
  return method != record->end() && *method == "mxfp4";
}

Mxfp4Tensors::Mxfp4Tensors(std::shared_ptr<const TensorSource> packed)
    : packed_(std::move(packed)), tensors_(packed_->tensors()) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : packed_->tensors()) {
    if (name.ends_with(kBlocks)) names.push_back(name.substr(0, name.size() - kBlocks.size()));
    if (!name.ends_with(kScales)) continue;
    const std::string blocks = name.substr(0, name.size() - kScales.size()).append(kBlocks);
    TESSERA_CHECK(packed_->find(blocks) != nullptr, ErrorKind::kFormat, path().string(),
                  ": found no tensor ", printable(blocks), ", expected one next to ",
                  printable(name));
  }
  for (const std::string& name : names) add(name);
}

void Mxfp4Tensors::add(const std::string& name) {
  const std::string blocks_name = name + std::string(kBlocks);
  const std::string scales_name = name + std::string(kScales);
  const SourceTensor& blocks = *packed_->find(blocks_name);
  const SourceTensor* const scales = packed_->find(scales_name);
  const std::string where = path().string();
  TESSERA_CHECK(scales != nullptr, ErrorKind::kFormat, where, ": found no tensor ",
                printable(scales_name), ", expected one next to ", printable(blocks_name));
  TESSERA_CHECK(packed_->find(name) == nullptr, ErrorKind::kFormat, where, ": found the tensor ",
                printable(name), " next to ", printable(blocks_name), ", expected its values once");
  const auto check_dtype = [&](const std::string& which, DType found) {
    TESSERA_CHECK(found == DType::kUInt8, ErrorKind::kFormat, where, ": tensor ", printable(which),
                  ": found dtype ", to_string(found), ", expected uint8");
  };
  check_dtype(blocks_name, blocks.dtype);
  check_dtype(scales_name, scales->dtype);
  TESSERA_CHECK(blocks.shape.size() == 4 && blocks.shape[3] == kPackedBytes, ErrorKind::kFormat,
                where, ": tensor ", printable(blocks_name), ": found shape ",
                shape_text(blocks.shape), ", expected [experts, rows, groups, 16]");
  TESSERA_CHECK(std::ranges::equal(scales->shape, std::span(blocks.shape).first(3)),
                ErrorKind::kFormat, where, ": tensor ", printable(scales_name), ": found shape ",
                shape_text(scales->shape), ", expected ",
                shape_text(std::span(blocks.shape).first(3)), ", one for 16 bytes of ",
                printable(blocks_name));
  const Shape shape{blocks.shape[1], blocks.shape[2]};
  SourceTensor shown{DType::kBFloat16,
                     {blocks.shape[0], shape.groups * kBlockValues, shape.rows},
                     DType::kBFloat16,
                     /*unpacked=*/true};
  tensors_.erase(blocks_name);
  tensors_.erase(scales_name);
  tensors_.emplace(name, std::move(shown));
  shapes_.emplace(name, shape);
}

void Mxfp4Tensors::unpack(const std::string& name, const Shape& shape, std::int64_t expert) const {
  static const Values values;
  const std::int64_t blocks_of_expert = shape.rows * shape.groups;
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(blocks_of_expert));
  std::vector<std::uint8_t> blocks(static_cast<std::size_t>(blocks_of_expert * kPackedBytes));
  packed_->read(name + std::string(kScales), expert * blocks_of_expert,
                (expert + 1) * blocks_of_expert, std::as_writable_bytes(std::span(scales)));
  packed_->read(name + std::string(kBlocks), expert * blocks_of_expert * kPackedBytes,
                (expert + 1) * blocks_of_expert * kPackedBytes,
                std::as_writable_bytes(std::span(blocks)));
  held_expert_ = -1;
  held_.resize(static_cast<std::size_t>(shape.numel()));
  bool fits = true;
  // A block is 32 values below each other: row after row they fill 32 rows of X.
  for (std::int64_t group = 0; group < shape.groups; ++group) {
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      const auto block = static_cast<std::size_t>(row * shape.groups + group);
      const auto& value_of = values.bits[scales[block]];
      const std::uint8_t* const bytes = blocks.data() + block * kPackedBytes;
      std::uint16_t* to = held_.data() + group * kBlockValues * shape.rows + row;
      fits = fits && scales[block] != kScaleOfNan;
      for (std::int64_t i = 0; i < kPackedBytes; ++i, to += 2 * shape.rows) {
        const std::uint16_t low = value_of[bytes[i] & 15U];
        const std::uint16_t high = value_of[bytes[i] >> 4U];
        to[0] = low;
        to[shape.rows] = high;
        fits = fits && is_finite(low) && is_finite(high);
      }
    }
  }
  TESSERA_CHECK(fits, ErrorKind::kFormat, path().string(), ": tensor ",
                printable(name + std::string(kScales)), ": found a scale in expert ", expert,
                " that stands for NaN or makes a value too large for bfloat16, expected finite "
                "values");
  held_name_ = name;
  held_expert_ = expert;
}

void Mxfp4Tensors::read(std::string_view name, std::int64_t begin, std::int64_t end,
                        std::span<std::byte> out) const {
  const auto found = shapes_.find(name);
  if (found == shapes_.end()) {
    TESSERA_CHECK(find(name) != nullptr, ErrorKind::kFormat, path().string(), ": found no tensor ",
                  printable(name));
    return packed_->read(name, begin, end, out);
  }
  TESSERA_CHECK(0 <= begin && begin <= end && end <= find(name)->numel(), ErrorKind::kUsage,
                path().string(), ": elements ", begin, " to ", end, " do not lie inside ",
                printable(name));
  TESSERA_INVARIANT(std::ssize(out) == (end - begin) * std::int64_t{sizeof(std::uint16_t)},
                    "a buffer of another size");
  const std::int64_t each = found->second.numel();
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t expert = at / each;
    const std::int64_t last = std::min(end, (expert + 1) * each);
    if (held_expert_ != expert || held_name_ != name) unpack(found->first, found->second, expert);
    std::memcpy(out.data() + (at - begin) * std::int64_t{sizeof(std::uint16_t)},
                held_.data() + (at - expert * each),
                static_cast<std::size_t>(last - at) * sizeof(std::uint16_t));
    at = last;
  }
}

}  // namespace tessera
