// Fields of a snapshot's records: numbers and floats little-endian, texts and lists after their
// lengths.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace thalweg {

static_assert(std::endian::native == std::endian::little);

// A FieldWriter appends fields to a record.
class FieldWriter {
 public:
  template <std::integral T>
  void Add(T value) {
    record_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void Add(const std::string& text) {
    Add(uint64_t{text.size()});
    record_ += text;
  }
  template <typename T>
  void Add(const std::vector<T>& values) {
    Add(uint64_t{values.size()});
    record_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  const std::string& record() const { return record_; }

 private:
  std::string record_;
};

// A FieldReader reads them from bytes that may be anything: what is not there is zero or empty, and
// the record is then not whole.
class FieldReader {
 public:
  explicit FieldReader(std::string_view record) : rest_(record) {}

  template <std::integral T>
  void Read(T& value) {
    value = 0;
    if (Has(sizeof value)) Take(&value, sizeof value);
  }
  void Read(std::string& text) {
    text.resize(ReadLength(1));
    Take(text.data(), text.size());
  }
  template <typename T>
  void Read(std::vector<T>& values) {
    values.resize(ReadLength(sizeof(T)));
    Take(values.data(), values.size() * sizeof(T));
  }
  // Returns whether all fields were there, and nothing else is.
  bool IsWhole() const { return is_ok_ && rest_.empty(); }
  // Reads the length of what has items of at least so many bytes; 0 if there is less.
  size_t ReadLength(size_t item_bytes) {
    uint64_t length = 0;
    Read(length);
    is_ok_ = is_ok_ && length <= rest_.size() / item_bytes;
    return is_ok_ ? length : 0;
  }

 private:
  bool Has(size_t bytes) {
    is_ok_ = is_ok_ && bytes <= rest_.size();
    return is_ok_;
  }
  void Take(void* to, size_t bytes) {
    if (bytes > 0) std::memcpy(to, rest_.data(), bytes);
    rest_.remove_prefix(bytes);
  }

  std::string_view rest_;
  bool is_ok_ = true;
};

}  // namespace thalweg
