// PeerWatch: what one rank reads of the others to tell a lost rank, a wait without an end and ranks
// that issue different collectives. Decisions only: no thread, no clock, no store of its own.
//
// [Note: who watches whom] Every rank keeps one short value in the store, its pulse: a number that
// grows, and while it waits also for which collective, for whose data, and hashes over what its
// groups have issued. A rank reads the pulses of the two ranks before it, and of the one that it
// waits for: a handful of requests a look, however many ranks there are. From rank to rank these
// pulses form a graph of who waits for whom. Its end is the rank that holds everybody up; a cycle
// through a collective that somebody has not issued is a deadlock; two neighbours whose hashes
// differ have issued different things, and only then texts are asked for. A chain of ranks inside
// one collective is as long as that has rounds, log2 N. Pure. Next: failure_watch.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::comm {

/// Keys of the store.
namespace store_key {
inline constexpr const char* kFailure = "failure";  ///< a FailureRecord: every process leaves
std::string abort(int epoch);                       ///< an Abort: every World is aborted
std::string pulse(int rank);                        ///< a Pulse
std::string asked(int epoch, int rank);             ///< somebody wants to read issued()
std::string issued(int epoch, int rank);            ///< lines of find_disagreement()
}  // namespace store_key

/// A wait for one collective.
struct PeerWait {
  std::uint64_t group = 0;  ///< hash of its name
  std::uint64_t sequence = 0;
  int peer = -1;     ///< world rank whose data has not come; -1: of no rank in particular
  std::string text;  ///< the collective and its group, in words
  /// As the rank's OrderLog has it; 0: it is not there.
  std::uint64_t what = 0;
  bool is_message = false;
  bool is_for_same(const PeerWait& other) const {
    return group == other.group && sequence == other.sequence;
  }
};

/// What a rank has issued on one group.
struct IssuedHashes {
  std::uint64_t group = 0;
  std::uint64_t count = 0;
  /// [k]: over the first count - k collectives.
  std::vector<std::uint64_t> latest;
  /// Of messages between two ranks, which have no common order: `latest` holds a hash of each that
  /// is under way here, `count` says how many these are. PeerWait::sequence is such a hash.
  bool of_messages = false;
};

enum class Issued : std::uint8_t { kSame, kDifferent, kTooFar };
/// Whether two ranks have issued the same as far as both have come. Not of messages.
Issued compare(const IssuedHashes& one, const IssuedHashes& other);

/// "rank 0 issues A but rank 1 issues B (group G)" for the first entry in which two ranks' lines
/// differ. A line: group, sequence, fingerprint, text, with tabs between.
std::optional<std::string> find_disagreement(int rank, const std::string& lines, int other,
                                             const std::string& other_lines);

/// Where a rank stands.
struct Standing {
  int waits = 0;                        ///< threads of it that wait; 0: it computes
  std::chrono::milliseconds waited{0};  ///< the oldest wait's time
  std::optional<PeerWait> wait;         ///< the oldest wait for a collective
  std::vector<IssuedHashes> issued;
  std::vector<int> peers;     ///< all ranks that are up, ascending, itself among them
  std::vector<int> doubtful;  ///< others that may be lost (WaitBoard::Doubt)
  bool leaves = false;        ///< WaitBoard::set_leaving()
};

/// What a rank says of itself all the time.
struct Pulse {
  std::uint64_t beat = 0;
  int epoch = 0;
  int waits = 0;
  std::optional<PeerWait> wait;
  int cause = -1;  ///< whom it takes to hold up `wait`, -1: not known
  std::vector<IssuedHashes> issued;
  bool leaves = false;  ///< it issues nothing any more
};
/// Begins with the beat; the rest only while it waits or leaves. A few hundred bytes.
std::string encode(const Pulse& pulse);
/// What cannot be read is left out: it comes from another process.
Pulse decode_pulse(const std::string& text);

/// The ranks before this one, in a ring of all: who looks whether they live. `ranks` ascending.
std::vector<int> watched_before(const std::vector<int>& ranks, int self);

/// How often a rank of so many beats and looks: what all of them ask of the store a second does not
/// grow with them.
std::chrono::milliseconds watch_poll(int ranks);

/// [Note: watch times] Whoever waits for what watches read or write must wait longer than they take
/// from one look to the next. All such times follow from that one interval, here.
struct WatchTimes {
  std::chrono::milliseconds poll{200};  ///< between looks, and between heartbeats

  /// Within which all ranks have read what one has written: some have just looked, and where many
  /// wait the store is busy with them.
  std::chrono::milliseconds words() const;
  /// Within which a rank that lives has said why it has closed its connections, where words take
  /// `words`: it may hear others first, and all ranks must know within 10 s.
  static std::chrono::milliseconds explaining(std::chrono::milliseconds words);
  /// Within which every rank that lives has beaten, whatever holds it up a little.
  std::chrono::milliseconds heartbeats() const;
  /// Without a heartbeat for so long a rank is lost.
  std::chrono::milliseconds silent_after() const;
  /// Within which the store takes one line of a rank that leaves, while all others look.
  std::chrono::milliseconds telling() const;
  /// Within which ranks that were started together and refused alike have found each other.
  std::chrono::milliseconds meeting() const;
  /// Within which all ranks have left after one has failed: it has told them, they have read it,
  /// and rank 0 has stayed for those that come to it last.
  std::chrono::milliseconds leaving() const;
  /// Between two questions of a rank that waits for a key: what all that wait ask of the store a
  /// second does not grow with them either.
  std::chrono::milliseconds pause() const;
};

/// The store as a watch needs it.
class WatchedStore {
 public:
  virtual ~WatchedStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Values by key, none where there is none: a bounded number of requests where all are there.
  virtual std::vector<std::optional<std::string>> find(const std::vector<std::string>& keys) = 0;
};

class PeerWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;

  struct Options {
    int rank = 0;
    std::chrono::milliseconds blocked_after{2000};
    std::chrono::milliseconds silent_after{6000};
  };

  struct Finding {
    enum class What : std::uint8_t { kLost, kDisagree };
    What what;
    std::string why;
  };

  PeerWatch(WatchedStore& store, Options options) : store_(store), options_(options) {}

  /// Reads what this rank watches. `lines` gives its own for find_disagreement().
  std::optional<Finding> look(Time now, int epoch, const Standing& standing,
                              const std::function<std::string()>& lines);

  /// The rank that holds up the wait of the last look; -1: not known, or there is none.
  int cause() const { return cause_; }
  /// The look that found the last beat of a rank to which this one listens; none: it has not beaten
  /// since a look read of it first.
  std::optional<Time> last_beat(int rank) const;

 private:
  struct Heard {
    std::string text;  ///< another one at each beat
    Time since;
    std::optional<Time> last_beat;  ///< none: read once
  };
  /// One rank of a chain of waits, and the collective that it waits in.
  struct Link {
    int rank;
    PeerWait wait;
    bool unissued;  ///< by the rank that is waited for
    std::string beat;
  };

  void listen(Time now, const Standing& standing);
  static void hear(std::map<int, Heard>& heard, int rank, std::string text, Time now);
  std::optional<Finding> find_silent(Time now) const;
  struct Said {
    Pulse pulse;
    bool lately;  ///< a rank that has stopped still says what it waited for then
  };
  Said pulse_of(int rank, Time now);
  /// The chain of waits from this rank on, until it ends or returns here.
  std::vector<Link> follow(Time now, const Standing& standing, std::size_t most, bool& returns);
  std::optional<Finding> find_deadlock(Time now, const std::vector<Link>& cycle);
  /// A wait for a rank that leaves, and has for so long that what it has sent would be here.
  std::optional<Finding> find_left(Time now, const Standing& standing);
  std::optional<Finding> compare_with(int peer, const Standing& standing,
                                      const std::function<std::string()>& lines);
  void answer(const std::function<std::string()>& lines);

  WatchedStore& store_;
  const Options options_;
  int epoch_ = 0;
  std::map<int, Heard> heard_;         ///< watched, and the one that this rank waits for
  std::map<int, Heard> heard_behind_;  ///< others of the chain of waits that the last look followed
  std::optional<Time> last_look_;
  int cause_ = -1;
  std::string suspected_;  ///< a cycle of waits, and when it was seen first
  Time suspected_since_;
  std::vector<std::string> suspected_beats_;
  std::optional<std::pair<int, Time>> left_;  ///< who is waited for and leaves, and seen since when
  std::optional<std::pair<int, int>> asked_;  ///< epoch and rank
  std::pair<int, std::string> published_{-1, ""};
};

}  // namespace tessera::comm
