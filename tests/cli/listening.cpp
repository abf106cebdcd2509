#include "cli/listening.h"

#include <arpa/inet.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <set>
#include <sstream>

#include "support/process.h"

namespace tessera::cli {
namespace {

/// From "0100007F" or four such words, each a number of this machine's byte order.
std::string address_text(const std::string& hex) {
  constexpr std::size_t kWord = 8;
  std::array<std::uint32_t, 4> words{};
  for (std::size_t i = 0; i * kWord < hex.size() && i < words.size(); ++i) {
    words[i] = static_cast<std::uint32_t>(std::stoul(hex.substr(i * kWord, kWord), nullptr, 16));
  }
  std::array<char, INET6_ADDRSTRLEN> text{};
  ::inet_ntop(hex.size() == kWord ? AF_INET : AF_INET6, words.data(), text.data(), text.size());
  return text.data();
}

std::set<std::string> sockets(pid_t pid) {
  std::set<std::string> inodes;
  std::error_code gone;
  const std::filesystem::path folder = "/proc/" + std::to_string(pid) + "/fd";
  // Not a range: that throws where the process ends on the way.
  for (std::filesystem::directory_iterator entry(folder, gone), end; entry != end;
       entry.increment(gone)) {
    std::error_code closed;
    const std::string target = std::filesystem::read_symlink(entry->path(), closed).string();
    if (target.starts_with("socket:[")) inodes.insert(target.substr(8, target.size() - 9));
  }
  return inodes;
}

pid_t parent_of(pid_t pid) {
  std::istringstream lines(proc_file(pid, "status"));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("PPid:")) return std::stoi(line.substr(5));
  }
  return 0;
}

/// Without those that another program, its launcher, has left open in it.
std::set<std::string> own_sockets(pid_t pid) {
  std::set<std::string> inodes = sockets(pid);
  const auto program = [](pid_t of) {
    std::error_code gone;
    return std::filesystem::read_symlink("/proc/" + std::to_string(of) + "/exe", gone);
  };
  const pid_t parent = parent_of(pid);
  if (program(parent) == program(pid)) return inodes;
  for (const std::string& inode : sockets(parent)) inodes.erase(inode);
  return inodes;
}

}  // namespace

std::vector<std::string> listening_addresses(pid_t pid) {
  const std::set<std::string> inodes = own_sockets(pid);
  std::vector<std::string> addresses;
  for (const char* table : {"net/tcp", "net/tcp6"}) {
    std::istringstream rows(proc_file(pid, table));
    for (std::string row; std::getline(rows, row);) {
      // sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
      std::istringstream row_words(row);
      const std::vector<std::string> fields{std::istream_iterator<std::string>(row_words), {}};
      constexpr const char* kListening = "0A";
      if (fields.size() < 10 || fields[3] != kListening || !inodes.contains(fields[9])) continue;
      addresses.push_back(address_text(fields[1].substr(0, fields[1].find(':'))));
    }
  }
  return addresses;
}

}  // namespace tessera::cli
