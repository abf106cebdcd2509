#include "train/hf/base_model.h"

#include <algorithm>
#include <vector>

#include "base/printable.h"
#include "comm/all_or_none.h"
#include "comm/group.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

constexpr std::int64_t kPartElements = std::int64_t{1} << 20;

Hash128 hash_of(const TensorSource& folder, const std::string& name, const SourceTensor& tensor) {
  Hash128Stream hash;
  std::vector<std::byte> bytes;
  for (std::int64_t begin = 0; begin < tensor.numel(); begin += kPartElements) {
    const std::int64_t end = std::min(begin + kPartElements, tensor.numel());
    bytes.resize(static_cast<std::size_t>((end - begin) * size_of(tensor.dtype)));
    folder.read(name, begin, end, bytes);
    hash.add(bytes);
  }
  return hash.digest();
}

std::string line_of(const std::string& name, const SourceTensor& tensor, const Hash128& hash) {
  std::string text = concat(name, "\n", to_string(tensor.dtype));
  for (const std::int64_t size : tensor.shape) text += concat(" ", size);
  return text + "\n" + to_string(hash) + "\n";
}

/// Of the `rank`-th of every `ranks` tensors, in their order.
std::vector<Hash128> hashes_of(const TensorSource& folder, int rank, int ranks) {
  std::vector<Hash128> hashes;
  int number = 0;
  for (const auto& [name, tensor] : folder.tensors()) {
    if (number++ % ranks == rank) hashes.push_back(hash_of(folder, name, tensor));
  }
  return hashes;
}

/// `hashes` by rank, as hashes_of gives them.
Hash128 combined(const TensorSource& folder, const std::vector<std::vector<Hash128>>& hashes) {
  Hash128Stream whole;
  std::size_t number = 0;
  for (const auto& [name, tensor] : folder.tensors()) {
    whole.add(line_of(name, tensor, hashes[number % hashes.size()].at(number / hashes.size())));
    ++number;
  }
  return whole.digest();
}

void require_base(const ModelSource& source, const Hash128& found) {
  TESSERA_CHECK(found == *source.base_hash, ErrorKind::kConfig, shown(source.folder->path()),
                ": found tensors with the hash ", to_string(found), ", expected ",
                to_string(*source.base_hash), ", those of the model beside which the adapters of ",
                shown(source.adapters->path()), " were trained; put that model back");
}

}  // namespace

Hash128 tensors_hash(const TensorSource& folder) {
  return combined(folder, {hashes_of(folder, 0, 1)});
}

Hash128 tensors_hash(const TensorSource& folder, World& world) {
  std::string mine;
  comm::on_all_or_none(world, "reading the model beside the adapters", [&] {
    for (const Hash128& hash : hashes_of(folder, world.rank(), world.size())) {
      mine += to_string(hash);
    }
  });
  constexpr std::size_t kDigits = 32;
  std::vector<std::vector<Hash128>> hashes;
  for (const std::string& text :
       comm::all_gather_bytes(world.control(), mine, "hashes of the model")) {
    hashes.emplace_back();
    for (std::size_t at = 0; at < text.size(); at += kDigits) {
      hashes.back().push_back(parse_hash128(std::string_view(text).substr(at, kDigits)).value());
    }
  }
  return combined(folder, hashes);
}

void check_base(const ModelSource& source) { require_base(source, tensors_hash(*source.folder)); }

void check_base(const ModelSource& source, World& world) {
  require_base(source, tensors_hash(*source.folder, world));
}

}  // namespace tessera::train
