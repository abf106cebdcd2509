#include "io/hf_shards.h"

#include <algorithm>
#include <charconv>
#include <iomanip>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "base/json_reader.h"
#include "base/printable.h"
#include "io/folder_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::string numbered_name(std::size_t number, std::size_t count) {
  std::ostringstream name;
  name << "model-" << std::setfill('0') << std::setw(5) << number << "-of-" << std::setw(5) << count
       << ".safetensors";
  return name.str();
}

constexpr int kMaxIndexDepth = 8;

}  // namespace

std::int64_t size_bytes(const TensorSpec& tensor) {
  return checked_numel(tensor.shape, tensor.dtype, ErrorKind::kUsage, printable(tensor.name)) *
         size_of(tensor.dtype);
}

std::vector<HfShard> plan_shards(const std::vector<TensorSpec>& tensors, std::int64_t max_bytes) {
  std::vector<HfShard> shards(1);
  std::int64_t filled = 0;
  for (const TensorSpec& tensor : tensors) {
    const std::int64_t bytes = size_bytes(tensor);
    if (!shards.back().tensors.empty() && bytes > max_bytes - filled) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().tensors.push_back(tensor);
    // A file that is over-full takes nothing more.
    filled = std::min(max_bytes, filled) + std::min(bytes, max_bytes - std::min(max_bytes, filled));
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    shards[i].file = shards.size() == 1 ? "model.safetensors" : numbered_name(i + 1, shards.size());
  }
  return shards;
}

std::string index_json(const std::vector<HfShard>& shards) {
  nlohmann::ordered_json files = nlohmann::ordered_json::object();
  std::int64_t total = 0;
  for (const HfShard& shard : shards) {
    for (const TensorSpec& tensor : shard.tensors) {
      files[tensor.name] = shard.file;
      total += size_bytes(tensor);
    }
  }
  const nlohmann::ordered_json whole = {{"metadata", {{"total_size", total}}},
                                        {"weight_map", files}};
  return whole.dump(2) + "\n";
}

HfIndex parse_hf_index(std::string_view text, std::string_view where) {
  const nlohmann::json root = parse_json_object(text, where, kMaxIndexDepth);
  const auto found = root.find("weight_map");
  TESSERA_CHECK(found != root.end() && found->is_object() && !found->empty(), ErrorKind::kFormat,
                where, ": found no tensor, expected an object weight_map of names and files");
  HfIndex index;
  for (const auto& [tensor, file] : found->items()) {
    TESSERA_CHECK(file.is_string(), ErrorKind::kFormat, where, ": found a JSON ", file.type_name(),
                  " as the file of ", printable(tensor), ", expected a file name");
    const auto& name = file.get_ref<const std::string&>();
    TESSERA_CHECK(is_plain_file_name(name), ErrorKind::kFormat, where, ": found the file ",
                  printable(name), " of ", printable(tensor),
                  ", expected the plain name of a file in the same folder");
    index.weight_map.emplace(tensor, name);
  }
  return index;
}

std::int64_t parse_byte_size(std::string_view text, std::string_view option) {
  constexpr std::pair<std::string_view, std::int64_t> kUnits[] = {
      {"", 1},
      {"B", 1},
      {"KB", 1000},
      {"MB", 1000 * 1000},
      {"GB", 1000 * 1000 * 1000},
      {"TB", std::int64_t{1000} * 1000 * 1000 * 1000},
      {"KiB", 1 << 10},
      {"MiB", 1 << 20},
      {"GiB", 1 << 30},
      {"TiB", std::int64_t{1} << 40}};
  std::int64_t number = 0;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view word(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  const auto* unit = std::find_if(std::begin(kUnits), std::end(kUnits),
                                  [&](const auto& known) { return known.first == word; });
  TESSERA_CHECK(failed == std::errc{} && number > 0 && unit != std::end(kUnits) &&
                    number <= std::numeric_limits<std::int64_t>::max() / unit->second,
                ErrorKind::kUsage, option, ": found ", printable(text),
                ", expected a size as 5GB, 500MB or 2GiB");
  return number * unit->second;
}

}  // namespace tessera
