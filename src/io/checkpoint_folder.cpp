#include "io/checkpoint_folder.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <ranges>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "io/safetensors.h"
#include "io/tensor_source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kConfigFile = "config.json";
// The number of bytes that are read at a time where rows are put together.
constexpr std::size_t kRowChunkBytes = std::size_t{1} << 20;

void check_size(const fs::path& path, std::int64_t found, std::int64_t expected) {
  TESSERA_CHECK(found == expected, ErrorKind::kFormat, shown(path), ": found ", found,
                " bytes, expected ", expected,
                " as the manifest says; the file was cut off or altered, take another checkpoint");
}

void check_hash(const fs::path& path, const Hash128& found, const Hash128& expected) {
  TESSERA_CHECK(found == expected, ErrorKind::kFormat, shown(path), ": found XXH3-128 ",
                to_string(found), ", expected ", to_string(expected),
                " as the manifest says; the file was altered, take another checkpoint");
}

/// A folder may have any name, but a name of a step must be that of its own step.
void check_step(const fs::path& folder, std::int64_t found) {
  const auto named = parse_step_folder((folder / "").parent_path().filename().native());
  TESSERA_CHECK(!named || *named == found, ErrorKind::kFormat, shown(folder / kManifestFile),
                ": found step ", found, ", expected ", named.value_or(0),
                " as its folder is named; give the folder its name back");
}

/// Opens the file for this call only: a checkpoint of many ranks has more files than a process may
/// open.
InputFile open_listed(const fs::path& path, const CheckpointFile& listed) {
  InputFile file(path);
  check_size(path, file.size_bytes(), listed.bytes);
  return file;
}

/// Returns the range of elements, counted in the piece's box, that the piece holds of the elements
/// [begin, end) of its tensor.
layout::Range part_in(const CheckpointPiece& piece, std::span<const std::int64_t> shape,
                      std::int64_t begin, std::int64_t end) {
  return {std::max(piece.begin, elements_before(piece.box, shape, begin)),
          std::min(piece.end, elements_before(piece.box, shape, end))};
}

/// Whether the elements of the range are consecutive in the tensor, too.
bool is_one_row(const TensorBox& box, std::span<const std::int64_t> shape, layout::Range range) {
  return position_in_tensor(box, shape, range.end - 1) -
             position_in_tensor(box, shape, range.begin) ==
         range.end - 1 - range.begin;
}

/// Copies elements of a piece to their positions in `out`, which begins at position `begin` of the
/// tensor.
struct PieceRead {
  const InputFile& file;
  const CheckpointPiece& piece;
  std::span<const std::int64_t> shape;
  std::int64_t data_offset;  // offset in the file of the piece's first element
  std::int64_t element_bytes;
  std::int64_t begin;
  std::span<std::byte> out;

  /// Returns the memory of `count` elements from `position` of the tensor on.
  std::span<std::byte> place(std::int64_t position, std::int64_t count) const {
    return out.subspan(static_cast<std::size_t>((position - begin) * element_bytes),
                       static_cast<std::size_t>(count * element_bytes));
  }
  void fetch(std::int64_t index, std::span<std::byte> into) const {
    file.read_range(data_offset + (index - piece.begin) * element_bytes, into);
  }

  void copy(layout::Range part) const {
    const auto [first, last] = part;
    if (is_one_row(piece.box, shape, part)) {
      fetch(first, place(position_in_tensor(piece.box, shape, first), last - first));
      return;
    }
    std::vector<std::byte> chunk(kRowChunkBytes);
    const auto most = static_cast<std::int64_t>(kRowChunkBytes) / element_bytes;
    for (std::int64_t at = first; at < last;) {
      const std::int64_t count = std::min(most, last - at);
      const auto bytes = std::span(chunk).first(static_cast<std::size_t>(count * element_bytes));
      fetch(at, bytes);
      for_each_row(piece.box, shape, at, at + count, [&](const BoxRow& row) {
        const auto to = place(row.position, row.count);
        std::memcpy(to.data(), bytes.data() + (row.index - at) * element_bytes, to.size());
      });
      at += count;
    }
  }
};

}  // namespace

bool CheckpointFolder::is_one(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return false;
  if (fs::exists(path / kManifestFile, ignored)) return true;
  // Other programs also have a file `latest` and folders of steps, next to the model that is meant.
  return !fs::exists(path / kConfigFile, ignored) && !CheckpointStore(path).steps().empty();
}

CheckpointFolder CheckpointFolder::open(const fs::path& path) {
  CheckpointFolder checkpoint;
  checkpoint.path_ = find_checkpoint(path).value_or(path);
  const fs::path manifest = checkpoint.path_ / kManifestFile;
  const std::string text = read_text_file(manifest, kMaxManifestBytes);
  check_manifest_hash(text, shown(manifest));
  checkpoint.manifest_hash_ = Hash128Stream().add(text).digest();
  checkpoint.manifest_ = parse_checkpoint_manifest(text, shown(manifest));
  checkpoint.tensors_ = std::exchange(checkpoint.manifest_.tensors, {});
  std::int64_t offset = 0;
  for (const CheckpointBlock& block : checkpoint.manifest_.blocks) {
    checkpoint.block_offsets_.push_back(offset);
    offset += block.bytes;
  }
  checkpoint.block_is_read_.resize(checkpoint.manifest_.blocks.size());

  check_step(checkpoint.path_, checkpoint.manifest_.step);
  for (const auto& [name, file] : checkpoint.manifest_.files) {
    open_listed(checkpoint.path_ / name, file);
  }
  const auto config = checkpoint.manifest_.files.find(kConfigFile);
  TESSERA_CHECK(config != checkpoint.manifest_.files.end(), ErrorKind::kFormat, shown(manifest),
                ": found no ", kConfigFile, " among the files, expected one");
  const fs::path config_path = checkpoint.path_ / kConfigFile;
  checkpoint.config_text_ = read_text_file(config_path, kMaxConfigBytes);
  check_hash(config_path, Hash128Stream().add(checkpoint.config_text_).digest(),
             config->second.xxh3_128);
  return checkpoint;
}

void CheckpointFolder::read_block(std::size_t index) const {
  if (block_is_read_[index]) return;
  const CheckpointBlock& block = manifest_.blocks[index];
  const fs::path path = path_ / kTensorsFile;
  if (!blocks_file_) {
    blocks_file_ = std::make_shared<const InputFile>(
        open_listed(path, manifest_.files.find(kTensorsFile)->second));
  }
  std::string text(static_cast<std::size_t>(block.bytes), '\0');
  blocks_file_->read_range(block_offsets_[index], std::as_writable_bytes(std::span(text)));
  check_hash(path, Hash128Stream().add(text).digest(), block.xxh3_128);
  tensors_.merge(parse_checkpoint_block(text, manifest_, index, shown(path)));
  block_is_read_[index] = true;
}

const CheckpointTensorMap& CheckpointFolder::tensors() const {
  for (std::size_t i = 0; i < manifest_.blocks.size(); ++i) read_block(i);
  return tensors_;
}

const CheckpointTensor* CheckpointFolder::find(std::string_view name) const {
  const auto behind =
      std::ranges::upper_bound(manifest_.blocks, name, std::less<>(),
                               [](const auto& block) -> std::string_view { return block.first; });
  if (behind != manifest_.blocks.begin()) {
    read_block(static_cast<std::size_t>(behind - manifest_.blocks.begin()) - 1);
  }
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

std::vector<std::string> CheckpointFolder::names(std::string_view prefix, std::size_t part,
                                                 std::size_t parts) const {
  std::vector<std::string> found;
  const auto add = [&](auto tensor, const std::string* end) {
    for (; tensor != tensors_.end() && tensor->first.starts_with(prefix); ++tensor) {
      if (end != nullptr && tensor->first >= *end) break;
      found.push_back(tensor->first);
    }
  };
  const auto& blocks = manifest_.blocks;
  if (blocks.empty()) {
    if (part == 0) add(tensors_.lower_bound(prefix), nullptr);
    return found;
  }
  for (std::size_t i = part; i < blocks.size(); i += parts) {
    const std::string* const end = i + 1 < blocks.size() ? &blocks[i + 1].first : nullptr;
    if (end != nullptr && *end <= prefix) continue;
    if (blocks[i].first > prefix && !blocks[i].first.starts_with(prefix)) break;
    read_block(i);
    add(tensors_.lower_bound(std::max<std::string_view>(blocks[i].first, prefix)), end);
  }
  return found;
}

std::vector<std::string> CheckpointFolder::data_files() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : manifest_.files) {
    const bool has_tensors = manifest_.format > 1 && name == kTensorsFile;
    if (name != kConfigFile && !has_tensors) names.push_back(name);
  }
  // Sorts by rank: names of one length differ in their digits.
  std::sort(names.begin(), names.end(), [](const auto& a, const auto& b) {
    return std::pair(a.size(), std::string_view(a)) < std::pair(b.size(), std::string_view(b));
  });
  return names;
}

void CheckpointFolder::verify(const std::string& name, std::vector<WantedBytes> wanted) const {
  const auto listed = manifest_.files.find(name);
  TESSERA_CHECK(listed != manifest_.files.end(), ErrorKind::kUsage, shown(path_),
                ": found no file ", printable(name), " in the manifest");
  const InputFile file = open_listed(path_ / name, listed->second);
  check_hash(file.path(), read_hashed_file(file, std::move(wanted)), listed->second.xxh3_128);
}

void CheckpointFolder::verify_all() const {
  tensors();
  for (const auto& [name, file] : manifest_.files) verify(name);
}

const TensorInfo& CheckpointFolder::where_in_file(const CheckpointPiece& piece, DType dtype) const {
  auto header = headers_.find(piece.file);
  if (header == headers_.end()) {
    header = headers_.emplace(piece.file, SafetensorsFile(path_ / piece.file).header()).first;
  }
  const TensorInfo* const info = header->second.find(piece.key);
  TESSERA_CHECK(info != nullptr && info->dtype == dtype && info->numel() == piece.end - piece.begin,
                ErrorKind::kFormat, shown(path_ / piece.file), ": found ",
                info == nullptr ? std::string("nothing")
                                : concat(to_string(info->dtype), " ", shape_text(info->shape)),
                " under ", printable(piece.key), ", expected ", piece.end - piece.begin,
                " elements of ", to_string(dtype), " as the manifest says");
  return *info;
}

const CheckpointTensor& CheckpointFolder::checked(std::string_view name, std::int64_t begin,
                                                  std::int64_t end) const {
  const CheckpointTensor* const tensor = find(name);
  TESSERA_CHECK(tensor != nullptr, ErrorKind::kFormat, shown(path_), ": found no tensor ",
                printable(name));
  TESSERA_CHECK(0 <= begin && begin <= end && end <= tensor->numel(), ErrorKind::kUsage,
                shown(path_), ": elements ", begin, " to ", end, " do not lie inside ",
                printable(name), " ", shape_text(tensor->shape));
  return *tensor;
}

std::vector<CheckpointFolder::Chunk> CheckpointFolder::chunks(std::string_view name,
                                                              const TensorBox& box,
                                                              std::int64_t begin,
                                                              std::int64_t end) const {
  const CheckpointTensor& tensor = checked(name, 0, 0);
  const bool is_whole = box == TensorBox::whole(tensor.shape);
  std::vector<Chunk> found;
  for (const CheckpointPiece& piece : tensor.pieces) {
    // a range of its box
    layout::Range part{std::max(piece.begin, begin), std::min(piece.end, end)};
    // a position in `box`
    std::int64_t position = part.begin;
    if (!(piece.box == box)) {
      if (!overlap(piece.box, box)) continue;
      if (!is_whole) return {};
      part = part_in(piece, tensor.shape, begin, end);
      if (!part.empty() && !is_one_row(piece.box, tensor.shape, part)) return {};
      if (!part.empty()) position = position_in_tensor(piece.box, tensor.shape, part.begin);
    }
    if (part.empty()) continue;
    const TensorInfo& info = where_in_file(piece, tensor.dtype);
    found.push_back({piece.file,
                     info.begin + (part.begin - piece.begin) * size_of(tensor.dtype),
                     {position, position + part.size()}});
  }
  return found;
}

void CheckpointFolder::read_box(std::string_view name, const TensorBox& box, std::int64_t begin,
                                std::int64_t end, std::span<std::byte> out) const {
  const CheckpointTensor& tensor = checked(name, 0, 0);
  tessera::read_box({tensor.shape, size_of(tensor.dtype), box, {begin, end}}, out,
                    [&](std::int64_t first, std::int64_t last, std::span<std::byte> to) {
                      read(name, first, last, to);
                    });
}

void CheckpointFolder::read(std::string_view name, std::int64_t begin, std::int64_t end,
                            std::span<std::byte> out) const {
  const CheckpointTensor& tensor = checked(name, begin, end);
  const std::int64_t element_bytes = size_of(tensor.dtype);
  TESSERA_CHECK(static_cast<std::int64_t>(out.size()) == (end - begin) * element_bytes,
                ErrorKind::kUsage, shown(path_), ": found room for ", out.size(), " bytes of ",
                printable(name), ", expected ", (end - begin) * element_bytes);
  for (const CheckpointPiece& piece : tensor.pieces) {
    const layout::Range part = part_in(piece, tensor.shape, begin, end);
    if (part.empty()) continue;
    const TensorInfo& info = where_in_file(piece, tensor.dtype);
    const InputFile file =
        open_listed(path_ / piece.file, manifest_.files.find(piece.file)->second);
    PieceRead{file, piece, tensor.shape, info.begin, element_bytes, begin, out}.copy(part);
  }
}

namespace {

bool has_manifest(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / kManifestFile, ignored);
}

}  // namespace

std::optional<fs::path> find_checkpoint(const fs::path& path) {
  if (has_manifest(path)) return path;
  const CheckpointStore store(path);
  const auto latest = store.latest();
  if (!latest) return std::nullopt;
  fs::path found = store.complete(*latest);
  try {
    require_whole(found);
  } catch (const Error& error) {
    const auto older = newest_whole_before(store, *latest);
    throw Error(error.kind(),
                concat(error.what(), older.text, older.step ? ": name that one to take it" : ""));
  }
  return found;
}

void require_whole(const fs::path& checkpoint) {
  TESSERA_CHECK(has_manifest(checkpoint), ErrorKind::kFormat, shown(checkpoint), ": found no ",
                kManifestFile,
                ", expected a whole checkpoint; copying or removing it was interrupted, or another "
                "program made the folder");
}

WholeBefore newest_whole_before(const CheckpointStore& store, std::int64_t step) {
  for (const std::int64_t older : store.steps() | std::views::reverse) {
    if (older >= step) continue;
    try {
      CheckpointFolder::open(store.complete(older));
      return {older,
              concat("; the newest whole checkpoint before it is ", shown(store.complete(older)))};
    } catch (const Error&) {
      continue;
    }
  }
  return {std::nullopt, "; there is no whole checkpoint before it"};
}

CheckpointTensors::CheckpointTensors(CheckpointFolder folder) : folder_(std::move(folder)) {
  for (const std::string& name : folder_.names(kModelPrefix)) {
    const CheckpointTensor& tensor = *folder_.find(name);
    tensors_[name.substr(kModelPrefix.size())] = {tensor.dtype, tensor.shape,
                                                  tensor.source_dtype.value_or(tensor.dtype)};
  }
}

void CheckpointTensors::read(std::string_view name, std::int64_t begin, std::int64_t end,
                             std::span<std::byte> out) const {
  folder_.read(std::string(kModelPrefix).append(name), begin, end, out);
}

std::vector<TensorSource::HashedFile> CheckpointTensors::hashed_files() const {
  std::vector<HashedFile> files;
  for (const auto& name : folder_.data_files()) {
    files.push_back({name, folder_.manifest().files.find(name)->second.bytes});
  }
  return files;
}

void write_manifest(const fs::path& folder, CheckpointManifest manifest) {
  validate(manifest, "the manifest to be written");
  const CheckpointTexts texts = texts_of(std::move(manifest));
  const auto write = [&](std::string_view name, const std::string& text) {
    write_hashed_file(folder / name, std::as_bytes(std::span(text)));
  };
  write(kTensorsFile, texts.tensors);
  write(kManifestFile, texts.manifest);
}

}  // namespace tessera
