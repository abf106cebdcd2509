#include "io/checkpoint_manifest.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/text/json_fields.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string dumped(const OrderedJson& value) {
  return value.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

// dumped() writes replacements for text that is not UTF-8; this leaves it out.
constexpr auto kIgnore = OrderedJson::error_handler_t::ignore;

/// Returns the value on one line, with a space after each comma and colon.
std::string line(const OrderedJson& value) {
  if (!value.is_structured()) return dumped(value);
  std::string text;
  for (auto item = value.begin(); item != value.end(); ++item) {
    if (!text.empty()) text += ", ";
    if (value.is_object()) text += dumped(item.key()) + ": ";
    text += line(*item);
  }
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

std::string entry(std::string_view name, const OrderedJson& value) {
  return dumped(name) + ": " + line(value);
}

/// Writes the values of a manifest whose form in JSON differs from their members.
struct ManifestAsJson {
  /// Writes the exponent of a scale, which is an integer for every scale.
  template <class Write>
  OrderedJson json(const Write&, double scale, Exponent) const {
    return std::ilogb(scale);
  }
  template <class Write>
  OrderedJson json(const Write&, const CheckpointValues& values, AnyValue) const {
    OrderedJson json = OrderedJson::object();
    for (const auto& [name, value] : values) {
      std::visit([&](const auto& one) { json[name] = one; }, value);
    }
    return json;
  }
};

template <class T, class Range = AnyValue>
OrderedJson json_of(const T& value, const Range& range = {}) {
  return JsonWriter(ManifestAsJson())(value, range);
}

/// Writes a list or an object under a key, with one line for each of its items.
template <class Items>
std::string on_lines(const Items& items) {
  constexpr bool kByName = requires { typename Items::mapped_type; };
  std::string text(1, kByName ? '{' : '[');
  for (const auto& item : items) {
    text += text.size() > 1 ? ",\n  " : "\n  ";
    if constexpr (kByName) {
      text += entry(item.first, json_of(item.second));
    } else {
      text += line(json_of(item));
    }
  }
  return text + "\n " + (kByName ? '}' : ']');
}

/// Returns the rank in a name that rank_file() has made.
std::int64_t rank_of(const CheckpointPiece& piece) {
  constexpr std::string_view kBefore = "rank_";
  std::int64_t rank = -1;
  const std::string_view name = piece.file;
  if (name.starts_with(kBefore)) {
    std::from_chars(name.data() + kBefore.size(), name.data() + name.size(), rank);
  }
  TESSERA_INVARIANT(rank >= 0 && rank_file(rank) == name, "a piece in ", name);
  return rank;
}

/// Writes pieces as [rank, begin, end] of the whole tensor, or followed by offset and size of their
/// box.
struct ShortRules {
  const std::string& name;
  TensorBox whole;

  template <class Write>
  OrderedJson json(const Write&, const std::vector<CheckpointPiece>& pieces, AnyValue) const {
    std::map<std::int64_t, std::size_t> numbers_of;  // the number of pieces in each file so far
    OrderedJson all = OrderedJson::array();
    for (const CheckpointPiece& piece : pieces) {
      const std::int64_t rank = rank_of(piece);
      TESSERA_INVARIANT(piece.key == piece_key(name, ++numbers_of[rank]), "the piece ", piece.key,
                        " of ", name);
      OrderedJson json = OrderedJson::array({rank, piece.begin, piece.end});
      if (!(piece.box == whole)) {
        json.push_back(piece.box.offset);
        json.push_back(piece.box.size);
      }
      all.push_back(std::move(json));
    }
    return all;
  }
};

std::string short_entry(const std::string& name, const CheckpointTensor& tensor) {
  const ShortRules rules{name, TensorBox::whole(tensor.shape)};
  return entry(name, JsonWriter(rules)(tensor));
}

// The largest number that a line may hold.
constexpr std::int64_t kLargestNumber = std::numeric_limits<std::int64_t>::max();

std::int64_t longest_file_line() {
  const std::map<std::string, CheckpointFile> files = {
      {rank_file(kLargestNumber), {kLargestNumber, {}}}};
  return std::ssize(on_lines(files));
}

/// Returns by how many digits the text of pieces may grow when they are cut elsewhere in their
/// boxes.
std::int64_t longest_cut(const CheckpointTensor& tensor) {
  const auto digits = [](std::int64_t number) { return std::ssize(std::to_string(number)); };
  std::int64_t more = 0;
  for (const CheckpointPiece& piece : tensor.pieces) {
    more += 2 * digits(piece.box.numel()) - digits(piece.begin) - digits(piece.end);
  }
  return more;
}

// The text ends with its own hash, that of all bytes before the digits.
constexpr std::string_view kHashKey = ",\n \"xxh3_128\": \"";
constexpr std::string_view kAfterHash = "\"\n}\n";
constexpr std::size_t kHashDigits = 32;

}  // namespace

std::string rank_file(std::int64_t rank) { return concat("rank_", rank, ".safetensors"); }

std::string piece_key(std::string_view tensor, std::size_t number) {
  return number == 1 ? std::string(tensor) : concat(tensor, "#", number);
}

std::int64_t CheckpointManifest::left_out() const {
  const std::int64_t skipped = loss_scale ? loss_scale->skipped_steps : 0;
  return left_out_steps.value_or(std::min(skipped, step));
}

std::int64_t CheckpointTensor::numel() const { return TensorBox::whole(shape).numel(); }

std::string to_json(const CheckpointManifest& manifest) {
  std::string text = "{";
  each_field<CheckpointManifest>(
      [&]<class M, class C, class Range>(const Field& field, M C::* member, const Range& range) {
        const M& value = manifest.*member;
        std::string shown;
        if constexpr (std::is_same_v<Range, OnLines>) {
          if (manifest.format < range.first_format || manifest.format > range.last_format) return;
          shown = on_lines(value);
        } else {
          if (field.missing == Missing::kLeftOut && value == M{}) return;
          shown = line(json_of(value, range));
        }
        text += concat(text.size() > 1 ? ",\n " : "\n ", dumped(field.key), ": ", shown);
      });
  text += kHashKey;
  text += to_string(Hash128Stream().add(text).digest());
  return text += kAfterHash;
}

void check_user_values(const CheckpointValues& values) {
  std::int64_t bytes = 0;
  const auto check = [&](const std::string& name, const std::string& text) {
    bytes += std::ssize(text);
    TESSERA_CHECK(dumped(text) == OrderedJson(text).dump(-1, ' ', false, kIgnore),
                  ErrorKind::kUsage, "checkpoint: user values: found ", printable(text), " of ",
                  printable(name), ", expected UTF-8");
  };
  for (const auto& [name, value] : values) {
    TESSERA_CHECK(!name.empty(), ErrorKind::kUsage,
                  "checkpoint: user values: found an empty name, expected one");
    check(name, name);
    if (const auto* text = std::get_if<std::string>(&value)) check(name, *text);
  }
  TESSERA_CHECK(bytes <= kMaxUserBytes, ErrorKind::kUsage, "checkpoint: user values: found ", bytes,
                " bytes of names and texts, expected at most ", kMaxUserBytes,
                "; write a separate file next to the checkpoint");
}

CheckpointTexts texts_of(CheckpointManifest manifest) {
  CheckpointTexts texts;
  std::string block;
  const std::string* first = nullptr;
  const auto end_block = [&] {
    block += "}\n";
    TESSERA_CHECK(std::ssize(block) <= kMaxBlockBytes, ErrorKind::kIo, kTensorsFile, ": found ",
                  block.size(), " bytes from ", printable(*first), " on, expected at most ",
                  kMaxBlockBytes, " in a block, which readers take; run on fewer ranks");
    manifest.blocks.push_back({*first, std::ssize(block), Hash128Stream().add(block).digest()});
    texts.tensors += block;
    block.clear();
  };
  manifest.blocks.clear();
  for (const auto& [name, tensor] : manifest.tensors) {
    TESSERA_CHECK(name.size() <= kMaxTensorNameBytes, ErrorKind::kIo, kTensorsFile,
                  ": found a name of ", name.size(), " bytes, ", printable(name),
                  ", expected at most ", kMaxTensorNameBytes);
    if (block.empty()) first = &name;
    block += (block.empty() ? "{" : ", ") + short_entry(name, tensor);
    if (std::ssize(block) >= kBlockBytes) end_block();
  }
  if (!block.empty()) end_block();
  manifest.files[std::string(kTensorsFile)] = {std::ssize(texts.tensors),
                                               Hash128Stream().add(texts.tensors).digest()};
  manifest.format = CheckpointManifest::kFormat;
  texts.manifest = to_json(manifest);
  TESSERA_CHECK(std::ssize(texts.manifest) <= kMaxManifestBytes, ErrorKind::kIo, kManifestFile,
                ": found ", texts.manifest.size(), " bytes, expected at most ", kMaxManifestBytes,
                ", which readers take; run on fewer ranks");
  return texts;
}

CheckpointPlan plan_of(const CheckpointManifest& part) {
  CheckpointPlan plan;
  for (const auto& [name, tensor] : part.tensors) {
    TESSERA_CHECK(name.size() <= kMaxTensorNameBytes, ErrorKind::kConfig,
                  "checkpoint: found a tensor with a name of ", name.size(), " bytes, ",
                  printable(name), ", expected at most ", kMaxTensorNameBytes,
                  ", which readers take; shorten it, or set checkpoint.enable = false");
    const auto bare =
        std::ssize(short_entry(name, {tensor.dtype, tensor.shape, tensor.source_dtype, {}}));
    const auto whole = std::ssize(short_entry(name, tensor)) + longest_cut(tensor);
    // The separators: between tensors and at the ends of a block; between pieces of two ranks.
    const auto head = std::ssize(std::string_view("{}\n")) + bare;
    const auto pieces = whole - bare + std::ssize(std::string_view(", "));
    plan.tensors += head + pieces;
    plan.pieces = std::max(plan.pieces, pieces);
    plan.head = std::max(plan.head, head);
  }
  const auto bytes = plan.tensors + std::ssize(part_text({})) + 2 * longest_file_line();
  TESSERA_CHECK(bytes <= kMaxManifestBytes, ErrorKind::kConfig,
                "checkpoint: found a rank that may have ", bytes, " bytes to say of its ",
                part.tensors.size(), " tensors, expected at most ", kMaxManifestBytes,
                ", which the rank that writes ", kManifestFile,
                " takes; run on more ranks, or set checkpoint.enable = false");
  return plan;
}

CheckpointPlan sum_of(const std::vector<CheckpointPlan>& plans) {
  CheckpointPlan sum;
  for (const CheckpointPlan& plan : plans) {
    sum.tensors += plan.tensors;
    sum.pieces += plan.pieces;
    sum.head = std::max(sum.head, plan.head);
  }
  return sum;
}

constexpr const char* kTooManyRanks =
    ", which readers take; run on fewer ranks, or set checkpoint.enable = false";

std::int64_t check_manifest_plan(const CheckpointManifest& about, std::int64_t ranks,
                                 const CheckpointPlan& plan) {
  // A block ends with the tensor that makes it long enough.
  const std::int64_t block = kBlockBytes + plan.head + plan.pieces;
  TESSERA_CHECK(block <= kMaxBlockBytes, ErrorKind::kConfig, "checkpoint: found a plan in which ",
                ranks, " ranks may have ", plan.pieces,
                " bytes of pieces of one tensor, a block of ", block, " in ", kTensorsFile,
                ", expected at most ", kMaxBlockBytes, kTooManyRanks);
  const auto entry_bytes = std::ssize(on_lines(
      std::vector<CheckpointBlock>{{std::string(kMaxTensorNameBytes, 'x'), kLargestNumber, {}}}));
  const std::int64_t most = std::ssize(to_json(about)) + (ranks + 2) * longest_file_line() +
                            (plan.tensors / kBlockBytes + 1) * entry_bytes;
  TESSERA_CHECK(most <= kMaxManifestBytes, ErrorKind::kConfig, "checkpoint: found a plan whose ",
                kManifestFile, " may have ", most, " bytes for ", ranks, " ranks and ",
                plan.tensors, " bytes of ", kTensorsFile, ", expected at most ", kMaxManifestBytes,
                kTooManyRanks);
  return most;
}

std::string part_text(const CheckpointManifest& part) {
  std::string text = concat("{\"files\": ", on_lines(part.files), ", \"tensors\": {");
  std::string_view between;
  for (const auto& [name, tensor] : part.tensors) {
    text += concat(between, short_entry(name, tensor));
    between = ", ";
  }
  return text + "}}";
}

void merge(CheckpointManifest& whole, const CheckpointManifest& part) {
  for (const auto& [name, file] : part.files) {
    TESSERA_INVARIANT(whole.files.emplace(name, file).second, "two ranks wrote the file ", name);
  }
  for (const auto& [name, tensor] : part.tensors) {
    const auto [known, added] = whole.tensors.try_emplace(name, tensor);
    if (added) continue;
    TESSERA_INVARIANT(known->second.dtype == tensor.dtype && known->second.shape == tensor.shape &&
                          known->second.source_dtype == tensor.source_dtype,
                      "two ranks describe ", name, " differently");
    known->second.pieces.insert(known->second.pieces.end(), tensor.pieces.begin(),
                                tensor.pieces.end());
  }
}

void check_manifest_hash(std::string_view text, std::string_view where) {
  const std::size_t tail = kHashDigits + kAfterHash.size();
  TESSERA_CHECK(text.size() > tail && text.ends_with(kAfterHash), ErrorKind::kFormat, where,
                ": found another end than tessera writes; the file was cut off or altered");
  const std::string_view hashed = text.substr(0, text.size() - tail);
  const auto stated = parse_hash128(text.substr(hashed.size(), kHashDigits));
  const Hash128 found = Hash128Stream().add(hashed).digest();
  TESSERA_CHECK(hashed.ends_with(kHashKey) && stated && *stated == found, ErrorKind::kFormat, where,
                ": found a text with XXH3-128 ", to_string(found), ", expected ",
                stated ? to_string(*stated) : "a hash at its end",
                "; the file was altered, take another checkpoint");
}

}  // namespace tessera
