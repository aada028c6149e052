#include "server/transport/wire/field_count.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "thalweg/v1/control.pb.h"

namespace thalweg::field_count_test {
namespace {

grpc::ByteBuffer Buffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

TEST(FieldCountTest, ElementsOfRepeatedFieldsCountEach) {
  v1::RegisterBucketRequest request;
  request.set_token(7);
  request.mutable_bucket()->set_index(300);
  request.set_raw_bytes(uint64_t{1} << 40);
  for (int i = 0; i < 100; ++i) request.add_tensors()->set_name(std::string(i, 'x'));
  const grpc::ByteBuffer bytes = Buffer(request.SerializeAsString());
  EXPECT_TRUE(HasAtMostFields(bytes, 103));
  EXPECT_FALSE(HasAtMostFields(bytes, 102));
}

TEST(FieldCountTest, MessageMayLieInSeveralPieces) {
  v1::RegisterBucketRequest request;
  for (int i = 0; i < 10; ++i) request.add_tensors()->set_name("name");
  std::vector<grpc::Slice> slices;
  for (const char byte : request.SerializeAsString()) slices.emplace_back(std::string(1, byte));
  const grpc::ByteBuffer bytes(slices.data(), slices.size());
  EXPECT_TRUE(HasAtMostFields(bytes, 10));
  EXPECT_FALSE(HasAtMostFields(bytes, 9));
}

TEST(FieldCountTest, EmptyMessageHasNoFields) { EXPECT_TRUE(HasAtMostFields(Buffer(""), 0)); }

TEST(FieldCountTest, WhatIsNoMessageHasTooMany) {
  EXPECT_FALSE(HasAtMostFields(Buffer("\x22\x05"
                                      "ab"),
                               10));                                      // cut off
  EXPECT_FALSE(HasAtMostFields(Buffer("\x22\xff\xff\xff\xff\x0f"), 10));  // 4 GiB long
  EXPECT_FALSE(HasAtMostFields(Buffer("\x23\x24"), 10));                  // a group
  EXPECT_FALSE(HasAtMostFields(Buffer(std::string(1, '\0')), 10));        // field 0
}

}  // namespace
}  // namespace thalweg::field_count_test
