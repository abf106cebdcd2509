#include "io/text_corpus.h"

#include <algorithm>
#include <system_error>

#include "base/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Each file is a mapping and a process has 65530 by default; others need some too.
constexpr std::size_t kMaxFiles = 16384;

}  // namespace

std::vector<fs::path> text_files(const fs::path& path) {
  std::error_code failed;
  if (!fs::is_directory(path, failed)) return {path};
  std::vector<fs::path> files;
  fs::directory_iterator entry(path, failed);
  for (; !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
    std::error_code ignored;
    if (entry->path().extension() == ".txt" && entry->is_regular_file(ignored)) {
      files.push_back(entry->path());
    }
  }
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot list ", shown(path), ": ", failed.message());
  std::sort(files.begin(), files.end());
  return files;
}

TextCorpus::TextCorpus(const fs::path& path) : name_(path.native()) { map(text_files(path)); }

TextCorpus::TextCorpus(const std::vector<fs::path>& files) {
  if (!files.empty()) name_ = files.front().native();
  if (files.size() > 1) name_ += concat(" and ", files.size() - 1, " more");
  std::vector<fs::path> all;
  for (const fs::path& entry : files) {
    const std::vector<fs::path> found = text_files(entry);
    all.insert(all.end(), found.begin(), found.end());
  }
  map(all);
}

void TextCorpus::map(const std::vector<fs::path>& files) {
  TESSERA_CHECK(!files.empty(), ErrorKind::kFormat, name_,
                ": found no text file, expected at least "
                "one (in a folder those that end in .txt)");
  TESSERA_CHECK(files.size() <= kMaxFiles, ErrorKind::kFormat, name_, ": found ", files.size(),
                " text files, expected at most ", kMaxFiles,
                "; join them or make one NAME.bin of them with tools/tokenize.py");
  std::int64_t end = 0;
  files_.reserve(files.size());
  ends_.reserve(files.size());
  for (const fs::path& file : files) {
    files_.emplace_back(file);
    files_.back().advise(Access::kRandom);
    end += files_.back().size_bytes() + 1;
    ends_.push_back(end);
  }
  TESSERA_CHECK(end > static_cast<std::int64_t>(files.size()), ErrorKind::kFormat, name_,
                ": found no byte of text, expected some");
}

void TextCorpus::copy(std::int64_t begin, std::span<std::int64_t> out) const {
  check_range(begin, out.size());
  auto file =
      static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
  std::size_t done = 0;
  while (done < out.size()) {
    const MappedFile& text = files_[file];
    const std::int64_t file_begin = ends_[file] - 1 - text.size_bytes();
    const std::int64_t at = begin + static_cast<std::int64_t>(done) - file_begin;
    const std::int64_t count =
        std::min(text.size_bytes() - at, static_cast<std::int64_t>(out.size() - done));
    const auto bytes = text.range(at, count);
    for (const std::byte byte : bytes) out[done++] = std::to_integer<std::int64_t>(byte);
    text.release(bytes);  // as in TokenFile::copy
    if (done < out.size()) {
      out[done++] = kEndOfDocument;
      ++file;
    }
  }
}

void TextCorpus::check_ids(std::int64_t vocab_size) const {
  TESSERA_CHECK(vocab_size >= kVocabSize, ErrorKind::kFormat, name_,
                ": text is read as bytes and needs a vocabulary of at least ", kVocabSize,
                ", found a model with ", vocab_size,
                "; use a model with more, or tokenize with tools/tokenize.py");
}

}  // namespace tessera
