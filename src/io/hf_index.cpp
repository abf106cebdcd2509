#include "io/hf_index.h"

#include <nlohmann/json.hpp>

#include "base/json_reader.h"
#include "base/printable.h"
#include "io/plain_file_name.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr int kMaxIndexDepth = 8;

}  // namespace

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

}  // namespace tessera
