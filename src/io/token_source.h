// Where training tokens come from: one long row of ids, read by position.
//
// A source says nothing about rows, batches or order; that is train/data. Sources are read from
// mappings and hold no copy. Implementations: token_file.h, text_corpus.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace tessera {

class TokenSource {
 public:
  virtual ~TokenSource() = default;

  virtual std::int64_t num_tokens() const = 0;

  /// Ids of the tokens [begin, begin + out.size()). Errors: kUsage outside the source. Threads:
  /// any.
  virtual void copy(std::int64_t begin, std::span<std::int64_t> out) const = 0;

  /// Whether some tokens are no targets.
  virtual bool has_mask() const { return false; }

  /// 1 where the token is a target, 0 where its label is -100. Errors and threads: as copy().
  virtual void copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const;

  /// Errors: kFormat naming the first id >= `vocab_size`, its position and what to do. May read
  /// all.
  virtual void check_ids(std::int64_t vocab_size) const = 0;

  /// The path that messages show.
  virtual std::string name() const = 0;

 protected:
  TokenSource() = default;
  TokenSource(TokenSource&&) = default;
  TokenSource& operator=(TokenSource&&) = default;

  void check_range(std::int64_t begin, std::size_t count) const;
};

}  // namespace tessera
