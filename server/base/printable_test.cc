#include "server/base/printable.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/base/protocol.h"

namespace thalweg::printable_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kPlenty = 1000;

TEST(PrintableTest, TextOfAnyLanguageStaysAsItIs) {
  for (const char* text : {"", "job 'bert-4f1c': \"x\" \\ %", "größer", "训练", "🙂 ok"}) {
    EXPECT_TRUE(IsPrintable(text)) << text;
    EXPECT_EQ(Printable(text, kPlenty), text);
  }
}

TEST(PrintableTest, WhatMovesTheCursorOrReordersTextIsEscaped) {
  const auto expect = [](const std::string& text, const char* escaped) {
    EXPECT_FALSE(IsPrintable(text)) << escaped;
    EXPECT_EQ(Printable(text, kPlenty), escaped);
    EXPECT_EQ(Printable(escaped, kPlenty), escaped);
  };
  expect("a\n12:00 error: b", "a\\n12:00 error: b");
  expect("\t\r\x1b[2J\x7f", "\\t\\x0d\\x1b[2J\\x7f");
  expect(std::string("a\0b", 3), "a\\x00b");
  expect("\xc2\x9b", "\\xc2\\x9b");             // CSI in one character
  expect("\xe2\x80\xa8", "\\xe2\\x80\\xa8");    // separator of lines
  expect("\xe2\x80\xae!", "\\xe2\\x80\\xae!");  // right to left
  expect("\xe2\x81\xa6", "\\xe2\\x81\\xa6");    // isolate
}

TEST(PrintableTest, WhatIsNotUtf8IsEscaped) {
  const auto expect = [](const std::string& text, const char* escaped) {
    EXPECT_FALSE(IsPrintable(text)) << escaped;
    EXPECT_EQ(Printable(text, kPlenty), escaped);
  };
  expect("\x80", "\\x80");                             // no first byte
  expect("\xc3", "\\xc3");                             // cut off
  expect("\xc3(", "\\xc3(");                           // goes on with something else
  expect("\xc0\xaf", "\\xc0\\xaf");                    // '/', longer than necessary
  expect("\xe0\x80\xaf", "\\xe0\\x80\\xaf");           // the same
  expect("\xed\xa0\x80", "\\xed\\xa0\\x80");           // surrogate
  expect("\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80");  // beyond Unicode
  expect("\xff", "\\xff");
}

TEST(PrintableTest, LongTextIsCutBetweenCharacters) {
  EXPECT_EQ(Printable("12345678", 8), "12345678");
  EXPECT_EQ(Printable("123456789", 8), "12345...");
  EXPECT_EQ(Printable("1234öäü", 8), "1234...");
  EXPECT_EQ(Printable("1234\n\n\n", 8), "1234...");
  const std::string cut = Printable(std::string(100, 'x') + "\n", 10);
  EXPECT_EQ(Printable(cut, 10), cut);
}

TEST(PrintableTest, NamesAreShortAndPrintable) {
  EXPECT_TRUE(CheckName("job name", "bert").ok());
  EXPECT_TRUE(CheckName("job name", std::string(kMaxNameBytes, 'x')).ok());
  for (const std::string& name : {std::string(), std::string(kMaxNameBytes + 1, 'x'),
                                  std::string("a\nb"), std::string("\xff")}) {
    const absl::Status refused = CheckName("job name", name);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("job name '"), HasSubstr("expected 1 to 512 bytes")));
    EXPECT_TRUE(IsPrintable(std::string(refused.message())));
    EXPECT_LT(refused.message().size(), 250u);
  }
}

}  // namespace
}  // namespace thalweg::printable_test
