// PeerWatch: decides from what one rank reads of others whether a rank is lost, a wait does not
// end, or ranks issue different collectives. It has no thread, no clock and no store.
//
// [Note: who watches whom] Every rank keeps one short value in the store, its pulse: a number that
// grows, and while it waits also the collective, the rank whose data is missing, and hashes of what
// its groups have issued. A rank reads the pulses of the two ranks before it, and of the one for
// which it waits: a handful of requests a look, for any number of ranks. From rank to rank these
// pulses form a graph of waits. Its end is the rank that delays all others; a cycle through a
// collective that one rank has not issued is a deadlock; two neighbours whose hashes differ have
// issued different things, and only then texts are read. A chain of ranks inside one collective is
// as long as that has rounds, log2 N. Pure. Next: failure_watch.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::comm {

/// The keys of the store.
namespace store_key {
inline constexpr const char* kFailure = "failure";  ///< a FailureRecord: every process leaves
std::string abort(int epoch);                       ///< an Abort: every World is aborted
std::string pulse(int rank);                        ///< a Pulse
std::string asked(int epoch, int rank);             ///< a rank wants to read issued()
std::string issued(int epoch, int rank);            ///< lines of find_disagreement()
}  // namespace store_key

/// A wait for one collective.
struct PeerWait {
  std::uint64_t group = 0;  ///< hash of its name
  std::uint64_t sequence = 0;
  int peer = -1;     ///< world rank whose data has not arrived; -1: none in particular
  std::string text;  ///< the collective and its group, as text
  /// As in the rank's OrderLog; 0: it is not there.
  std::uint64_t what = 0;
  bool is_message = false;
  bool is_for_same(const PeerWait& other) const {
    return group == other.group && sequence == other.sequence;
  }
};

/// The issues of a rank on one group, as hashes.
struct IssuedHashes {
  std::uint64_t group = 0;
  std::uint64_t count = 0;
  /// [k]: over the first count - k collectives.
  std::vector<std::uint64_t> latest;
  /// For messages between two ranks, which have no common order: `latest` holds a hash of each that
  /// is in flight here, `count` is their number. PeerWait::sequence is such a hash.
  bool of_messages = false;
};

enum class Issued : std::uint8_t { kSame, kDifferent, kTooFar };
/// Whether two ranks have issued the same as far as both have come. Not for messages.
Issued compare(const IssuedHashes& one, const IssuedHashes& other);

/// "rank 0 issues A but rank 1 issues B (group G)" for the first entry in which two ranks' lines
/// differ. A line: group, sequence, fingerprint, text, with tabs between.
std::optional<std::string> find_disagreement(int rank, const std::string& lines, int other,
                                             const std::string& other_lines);

/// The present state of a rank.
struct Standing {
  int waits = 0;                        ///< number of its threads that wait; 0: it computes
  std::chrono::milliseconds waited{0};  ///< duration of the oldest wait
  std::optional<PeerWait> wait;         ///< the oldest wait for a collective
  std::vector<IssuedHashes> issued;
  std::vector<int> peers;     ///< all ranks that are up, ascending, with itself
  std::vector<int> doubtful;  ///< others that may be lost (WaitBoard::Doubt)
  bool leaves = false;        ///< WaitBoard::set_leaving()
};

/// The value by which a rank continuously tells what it does.
struct Pulse {
  std::uint64_t beat = 0;
  int epoch = 0;
  int waits = 0;
  std::optional<PeerWait> wait;
  int cause = -1;  ///< the rank that it takes to delay `wait`, -1: unknown
  std::vector<IssuedHashes> issued;
  bool leaves = false;  ///< whether it issues nothing any more
};
/// Begins with the beat; the rest follows only while it waits or leaves. A few hundred bytes.
std::string encode(const Pulse& pulse);
/// Leaves out what cannot be read: another process has written it.
Pulse decode_pulse(const std::string& text);

/// Returns the ranks before this one, in a ring of all, whose lives it watches. `ranks` ascending.
std::vector<int> watched_before(const std::vector<int>& ranks, int self);

/// The interval at which a rank of so many beats and looks: the requests of all ranks to the store
/// in a second do not grow with their number.
std::chrono::milliseconds watch_poll(int ranks);

/// [Note: watch times] A wait for what watches read or write must be longer than their interval
/// from one look to the next. All such times follow from that interval, here.
struct WatchTimes {
  std::chrono::milliseconds poll{200};  ///< between looks, and between heartbeats

  /// The time in which all ranks have read what one has written: some have just looked, and where
  /// many wait the store is busy with them.
  std::chrono::milliseconds words() const;
  /// The time in which a live rank has said why it has closed its connections, where messages take
  /// `words`: it may listen to others first, and all ranks must know within 10 s.
  static std::chrono::milliseconds explaining(std::chrono::milliseconds words);
  /// The time in which every live rank has beaten, even if something delays it a little.
  std::chrono::milliseconds heartbeats() const;
  /// A rank is lost that has had no heartbeat for so long.
  std::chrono::milliseconds silent_after() const;
  /// The time in which the store takes one line of a rank that leaves, while all others look.
  std::chrono::milliseconds telling() const;
  /// The time in which ranks that were started together and refused alike have found each other.
  std::chrono::milliseconds meeting() const;
  /// The time in which all ranks have left after one has failed: it has told them, they have read
  /// it, and rank 0 has stayed for the last ones.
  std::chrono::milliseconds leaving() const;
  /// The interval between two requests of a rank that waits for a key: these requests, too, do not
  /// grow with the number of ranks.
  std::chrono::milliseconds pause() const;
};

/// The store's functions that a watch needs.
class WatchedStore {
 public:
  virtual ~WatchedStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Returns values by key, none for a missing key: a bounded number of requests where all exist.
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

  /// Reads what this rank watches. `lines` returns its own for find_disagreement().
  std::optional<Finding> look(Time now, int epoch, const Standing& standing,
                              const std::function<std::string()>& lines);

  /// The rank that delays the wait of the last look; -1: unknown, or there is none.
  int cause() const { return cause_; }
  /// The time of the look that found the last beat of a rank to which this one listens; none: the
  /// rank has not beaten since a look first read it.
  std::optional<Time> last_beat(int rank) const;

 private:
  struct Heard {
    std::string text;  ///< different at each beat
    Time since;
    std::optional<Time> last_beat;  ///< none: read once
  };
  /// One rank of a chain of waits, and the collective in which it waits.
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
  /// Follows the chain of waits from this rank, until it ends or returns here.
  std::vector<Link> follow(Time now, const Standing& standing, std::size_t most, bool& returns);
  std::optional<Finding> find_deadlock(Time now, const std::vector<Link>& cycle);
  /// Finds a wait for a rank that has been leaving for so long that what it has sent would be here.
  std::optional<Finding> find_left(Time now, const Standing& standing);
  std::optional<Finding> compare_with(int peer, const Standing& standing,
                                      const std::function<std::string()>& lines);
  void answer(const std::function<std::string()>& lines);

  WatchedStore& store_;
  const Options options_;
  int epoch_ = 0;
  std::map<int, Heard> heard_;  ///< those watched, and the one that this rank waits for
  /// other ranks of the chain of waits that the last look followed
  std::map<int, Heard> heard_behind_;
  std::optional<Time> last_look_;
  int cause_ = -1;
  std::string suspected_;  ///< a cycle of waits, and when it was first seen
  Time suspected_since_;
  std::vector<std::string> suspected_beats_;
  /// the rank that is waited for and leaves, and since when
  std::optional<std::pair<int, Time>> left_;
  std::optional<std::pair<int, int>> asked_;  ///< epoch and rank
  std::pair<int, std::string> published_{-1, ""};
};

}  // namespace tessera::comm
