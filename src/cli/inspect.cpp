// The tensors of a Hugging Face folder, of one safetensors file, of a checkpoint: from headers and
// manifests, no weight is read.
#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/printable.h"
#include "cli/arguments.h"
#include "cli/exit_code.h"
#include "io/checkpoint_folder.h"
#include "io/hf_folder.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ListedTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  std::int64_t elements = 0;
  std::int64_t bytes = 0;
  Json file;    ///< its name; null where no single file holds the tensor
  Json pieces;  ///< of a checkpoint's tensor, as in its manifest
};

/// What both outputs show.
struct Listing {
  std::vector<ListedTensor> tensors;
  std::int64_t elements = 0;
  std::int64_t bytes = 0;
  std::size_t num_files = 0;
  std::optional<std::int64_t> step;  ///< of a checkpoint
  Json files;                        ///< of a checkpoint: name, size and hash of every one

  void add(ListedTensor tensor) {
    // A manifest may claim anything; sizes of files are compared with it, not those of tensors.
    TESSERA_CHECK(!__builtin_add_overflow(elements, tensor.elements, &elements) &&
                      !__builtin_add_overflow(bytes, tensor.bytes, &bytes),
                  ErrorKind::kFormat, printable(tensor.name),
                  ": found more bytes in all tensors up to here than 64 bits count");
    tensors.push_back(std::move(tensor));
  }
};

Listing listing_of(const HfFolder& folder) {
  Listing listing;
  for (const auto& [name, tensor] : folder.tensors()) {
    const TensorInfo& info = *tensor.info;
    listing.add({.name = name,
                 .dtype = info.dtype,
                 .shape = info.shape,
                 .elements = info.numel(),
                 .bytes = info.size_bytes(),
                 .file = folder.file(tensor.file).path().filename().string(),
                 .pieces = {}});
  }
  listing.num_files = folder.num_files();
  return listing;
}

Json json_of(const CheckpointPiece& piece) {
  return {{"file", piece.file},
          {"key", piece.key},
          {"box", {{"offset", piece.box.offset}, {"size", piece.box.size}}},
          {"begin", piece.begin},
          {"end", piece.end}};
}

/// The one that holds all of a tensor.
Json file_of(const std::vector<CheckpointPiece>& pieces) {
  const auto elsewhere = [&](const auto& piece) { return piece.file != pieces.front().file; };
  if (pieces.empty() || std::ranges::any_of(pieces, elsewhere)) return nullptr;
  return pieces.front().file;
}

Listing listing_of(const CheckpointFolder& checkpoint) {
  Listing listing;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    Json pieces = Json::array();
    for (const CheckpointPiece& piece : tensor.pieces) pieces.push_back(json_of(piece));
    listing.add({.name = name,
                 .dtype = tensor.dtype,
                 .shape = tensor.shape,
                 .elements = tensor.numel(),
                 .bytes = tensor.numel() * size_of(tensor.dtype),
                 .file = file_of(tensor.pieces),
                 .pieces = std::move(pieces)});
  }
  listing.num_files = checkpoint.data_files().size();
  listing.step = checkpoint.manifest().step;
  listing.files = Json::object();
  for (const auto& [name, file] : checkpoint.manifest().files) {
    listing.files[name] = {{"bytes", file.bytes}, {"xxh3_128", to_string(file.xxh3_128)}};
  }
  return listing;
}

// Without the quotes of a message: a table has its own borders.
std::string shown_name(std::string_view name) {
  const std::string quoted = printable(name);
  return quoted.substr(1, quoted.size() - 2);
}

void print_table(const Listing& listing) {
  std::size_t widest = 0;
  for (const auto& tensor : listing.tensors) {
    widest = std::max(widest, shown_name(tensor.name).size());
  }
  for (const auto& tensor : listing.tensors) {
    std::cout << std::left << std::setw(static_cast<int>(widest) + 2) << shown_name(tensor.name)
              << std::setw(10) << to_string(tensor.dtype) << std::setw(20)
              << shape_text(tensor.shape) << std::right << std::setw(14) << tensor.bytes
              << " bytes";
    if (listing.step) std::cout << " in " << tensor.pieces.size() << " piece(s)";
    std::cout << '\n';
  }
  if (listing.step) std::cout << "step " << *listing.step << ": ";
  std::cout << listing.tensors.size() << " tensors, " << listing.elements << " elements, "
            << listing.bytes << " bytes in " << listing.num_files << " file(s)\n";
}

void print_listing_json(const Listing& listing) {
  Json whole;
  if (listing.step) whole["step"] = *listing.step;
  Json& tensors = whole["tensors"] = Json::object();
  for (const auto& tensor : listing.tensors) {
    Json one = {{"dtype", to_string(tensor.dtype)},
                {"shape", tensor.shape},
                {"bytes", tensor.bytes},
                {"file", tensor.file}};
    if (listing.step) one["pieces"] = tensor.pieces;
    tensors[tensor.name] = std::move(one);
  }
  if (listing.step) whole["files"] = listing.files;
  whole["total"] = {{"tensors", listing.tensors.size()},
                    {"elements", listing.elements},
                    {"bytes", listing.bytes},
                    {"files", listing.num_files}};
  std::cout << whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
}

Listing listing_at(const std::string& path) {
  if (std::filesystem::is_directory(path) && CheckpointFolder::is_one(path)) {
    return listing_of(CheckpointFolder::open(path));
  }
  const bool is_file = path.ends_with(".safetensors") && !std::filesystem::is_directory(path);
  return listing_of(is_file ? HfFolder::of_file(path) : HfFolder::open(path));
}

}  // namespace

int run_inspect(const InspectArguments& arguments) {
  if (!arguments.contract_file.empty()) {
    inspect_contract(arguments);
    return kDone;
  }
  TESSERA_CHECK(arguments.overrides.empty(), ErrorKind::kUsage, "--",
                arguments.overrides.empty() ? "" : arguments.overrides.front().first,
                ": found beside a folder, expected it beside --contract only");
  const Listing listing = listing_at(arguments.folder);
  arguments.json ? print_listing_json(listing) : print_table(listing);
  return kDone;
}

}  // namespace tessera::cli
