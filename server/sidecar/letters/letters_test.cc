#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/sidecar/letters/correspondence.h"
#include "server/sidecar/letters/letter.h"
#include "server/sidecar/letters/mailbox.h"

namespace thalweg::letters_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Payload PayloadOf(const std::string& text) {
  const auto kept = std::make_shared<const std::string>(text);
  return {std::as_bytes(std::span(*kept)), kept};
}

std::string TextOf(const Payload& payload) {
  std::string text;
  for (const auto& piece : payload.pieces) {
    text.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return text;
}

Letter Offering(uint64_t message) {
  return {.kind = LetterKind::kOffer,
          .group = 3,
          .from = 1,
          .to = 2,
          .tag = 1ull << 40,
          .bytes = 1ull << 33,
          .message = message,
          .offset = 7,
          .taken = 0};
}

TEST(LetterTest, ComesOutAsItWasSealedHoweverItIsCut) {
  const Payload sealed = Seal(Offering(9), PayloadOf("the body"));
  EXPECT_EQ(sealed.SizeBytes(), kLetterHeadBytes + 8);
  const std::string bytes = TextOf(sealed);
  for (const size_t cut : {size_t{1}, size_t{55}, size_t{56}, size_t{60}}) {
    Payload pieces = PayloadOf(bytes);
    const auto all = pieces.pieces[0];
    pieces.pieces = {all.first(cut), {}, all.subspan(cut)};
    const auto opened = OpenLetter(pieces);
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ(opened->letter, Offering(9));
    EXPECT_EQ(TextOf(opened->body), "the body");
  }
}

TEST(LetterTest, OtherBytesAreRefused) {
  for (const std::string& bytes :
       {std::string(), std::string(55, '\1'), std::string(60, '\0'), std::string(60, '\5')}) {
    EXPECT_THAT(std::string(OpenLetter(PayloadOf(bytes)).status().message()),
                HasSubstr("expected a letter"));
  }
}

// Writes `count` letters and returns all that may go.
std::vector<Correspondence::Outgoing> Post(Correspondence& from, uint64_t first, int count) {
  for (int i = 0; i < count; ++i) from.Write(Offering(first + i), {});
  std::vector<Correspondence::Outgoing> gone;
  while (auto next = from.Next()) gone.push_back(*std::move(next));
  return gone;
}

std::vector<uint64_t> MessagesOf(const absl::StatusOr<std::vector<OpenedLetter>>& letters) {
  EXPECT_TRUE(letters.ok()) << letters.status();
  std::vector<uint64_t> messages;
  for (const OpenedLetter& opened : *letters) messages.push_back(opened.letter.message);
  return messages;
}

TEST(CorrespondenceTest, LettersAreReadInOrderWhicheverComesFirst) {
  Correspondence a(4), b(4);
  const auto gone = Post(a, 1, 3);
  ASSERT_EQ(gone.size(), 3u);
  EXPECT_THAT(MessagesOf(b.Take(gone[2].number, gone[2].sealed)), ElementsAre());
  EXPECT_THAT(MessagesOf(b.Take(gone[0].number, gone[0].sealed)), ElementsAre(1));
  EXPECT_THAT(MessagesOf(b.Take(gone[1].number, gone[1].sealed)), ElementsAre(2, 3));
}

TEST(CorrespondenceTest, WindowOpensWithReceiptsAndAnswers) {
  Correspondence a(4), b(4);
  auto gone = Post(a, 1, 9);
  ASSERT_EQ(gone.size(), 4u);
  for (const auto& letter : gone) EXPECT_TRUE(b.Take(letter.number, letter.sealed).ok());
  EXPECT_EQ(Post(a, 10, 0).size(), 0u);  // nobody has confirmed anything
  auto receipts = Post(b, 1, 0);
  ASSERT_EQ(receipts.size(), 1u);
  EXPECT_EQ(receipts[0].number, 0u);
  EXPECT_THAT(MessagesOf(a.Take(0, receipts[0].sealed)), ElementsAre());
  gone = Post(a, 10, 0);
  ASSERT_EQ(gone.size(), 4u);
  EXPECT_TRUE(b.Take(gone[0].number, gone[0].sealed).ok());
  const auto answers = Post(b, 1, 1);  // too few for a receipt, but an answer says it, too
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_THAT(MessagesOf(a.Take(answers[0].number, answers[0].sealed)), ElementsAre(1));
  EXPECT_EQ(Post(a, 10, 0).size(), 1u);
}

TEST(CorrespondenceTest, RequestsOvertakeWhatWaits) {
  Correspondence a(2), b(2);
  auto gone = Post(a, 1, 3);
  ASSERT_EQ(gone.size(), 2u);
  a.Write({.kind = LetterKind::kRequest, .message = 9}, {});
  for (const auto& letter : gone) EXPECT_TRUE(b.Take(letter.number, letter.sealed).ok());
  const auto receipts = Post(b, 1, 0);
  ASSERT_EQ(receipts.size(), 1u);
  ASSERT_TRUE(a.Take(0, receipts[0].sealed).ok());
  gone = Post(a, 4, 0);
  ASSERT_EQ(gone.size(), 2u);
  EXPECT_THAT(MessagesOf(b.Take(gone[0].number, gone[0].sealed)), ElementsAre(9));
  EXPECT_THAT(MessagesOf(b.Take(gone[1].number, gone[1].sealed)), ElementsAre(3));
}

TEST(CorrespondenceTest, LettersThatCannotBeAreRefused) {
  Correspondence a(4), b(4);
  const auto gone = Post(a, 1, 2);
  EXPECT_TRUE(b.Take(gone[0].number, gone[0].sealed).ok());
  EXPECT_FALSE(b.Take(gone[0].number, gone[0].sealed).ok()) << "twice";
  EXPECT_FALSE(b.Take(6, gone[1].sealed).ok()) << "beyond the window";
  EXPECT_FALSE(b.Take(0, gone[1].sealed).ok()) << "an offer without a number";
  EXPECT_FALSE(b.Take(2, Seal({.kind = LetterKind::kOffer, .taken = 1}, {})).ok())
      << "confirms what was never written";
}

std::shared_ptr<Receiving> Want(uint32_t from, uint64_t tag) {
  auto receive = std::make_shared<Receiving>();
  receive->call = {.from = from, .tag = tag};
  return receive;
}

TEST(CorrespondenceTest, EndsThatSettleConfirmAtOnceWhatTheyHaveTaken) {
  Correspondence one(16), other(16);
  EXPECT_TRUE(one.is_settled());
  one.Write(Offering(1), PayloadOf("a"));
  EXPECT_FALSE(one.is_settled());
  const auto first = one.Next();
  ASSERT_TRUE(other.Take(first->number, first->sealed).ok());
  EXPECT_FALSE(other.Next().has_value());  // far from a window
  one.Settle(false);
  const auto asks = one.Next();
  ASSERT_TRUE(asks.has_value());
  EXPECT_EQ(asks->number, 0u);
  EXPECT_FALSE(one.Next().has_value());  // once is enough
  ASSERT_TRUE(other.Take(0, asks->sealed).ok());
  const auto receipt = other.Next();
  ASSERT_TRUE(receipt.has_value());
  ASSERT_TRUE(one.Take(receipt->number, receipt->sealed).ok());
  EXPECT_TRUE(one.is_settled());
  // What comes later is confirmed at once, too.
  one.Write(Offering(2), PayloadOf("b"));
  const auto second = one.Next();
  ASSERT_TRUE(other.Take(second->number, second->sealed).ok());
  EXPECT_TRUE(other.Next().has_value());
}

TEST(CorrespondenceTest, EndThatGivesUpIsSettledWhenTheOtherKnows) {
  Correspondence one(16), other(16);
  one.Write(Offering(1), PayloadOf("a"));
  const auto first = one.Next();
  ASSERT_TRUE(other.Take(first->number, first->sealed).ok());
  one.Settle(true);
  const auto leaves = one.Next();
  ASSERT_TRUE(leaves.has_value());
  EXPECT_FALSE(other.other_has_given_up());
  ASSERT_TRUE(other.Take(0, leaves->sealed).ok());
  EXPECT_TRUE(other.other_has_given_up());
  EXPECT_FALSE(one.is_settled());
  const auto answer = other.Next();
  ASSERT_TRUE(answer.has_value());
  EXPECT_FALSE(other.Next().has_value());  // once is enough
  ASSERT_TRUE(one.Take(answer->number, answer->sealed).ok());
  EXPECT_TRUE(one.is_settled());
  EXPECT_FALSE(one.other_has_given_up());
}

TEST(MailboxTest, OffersAndReceivesMeetBySourceAndTagInOrder) {
  Mailbox box;
  EXPECT_EQ(box.Put({.from = 1, .tag = 5, .bytes = 1}), nullptr);
  EXPECT_EQ(box.Put({.from = 2, .tag = 5, .bytes = 2}), nullptr);
  EXPECT_EQ(box.Put({.from = 1, .tag = 5, .bytes = 3}), nullptr);
  const auto other_tag = Want(1, 6), second = Want(2, 5), any = Want(ipc::kFromAnyone, 5);
  EXPECT_FALSE(box.Ask(other_tag));
  EXPECT_TRUE(box.Ask(second));
  EXPECT_EQ(second->offer.bytes, 2u);
  EXPECT_TRUE(box.Ask(any));
  EXPECT_EQ(any->offer.bytes, 1u);
  const auto first = Want(1, 5), later = Want(1, 5);
  EXPECT_TRUE(box.Ask(first));
  EXPECT_EQ(first->offer.bytes, 3u);
  EXPECT_FALSE(box.Ask(later));
  EXPECT_EQ(box.Put({.from = 1, .tag = 6, .bytes = 4}), other_tag);
  EXPECT_EQ(box.Put({.from = 1, .tag = 5, .bytes = 5}), later);
  EXPECT_EQ(later->offer.bytes, 5u);
}

}  // namespace
}  // namespace thalweg::letters_test
